"""Decoding of clips: streams of frames with carried state, exact in space and in time."""
