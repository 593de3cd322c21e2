"""Decoder families: each recognises its weights and lowers them to a Program."""
