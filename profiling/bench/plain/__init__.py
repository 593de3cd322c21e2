"""Decoders as anybody would write them in torch: the yardstick. They share nothing with the engine."""
