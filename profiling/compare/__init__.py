"""The same decodes in several PyTorch installations: how they compare, and what about them differs."""
