"""The host's own decode against ours, on the same latent: run in turn, measured in one way, judged with its doubts."""
