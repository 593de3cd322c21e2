"""The engine: weights to Program to Plan to picture. Imports no ComfyUI and no profiler."""
