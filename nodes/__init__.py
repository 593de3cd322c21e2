"""ComfyUI nodes: thin classes over the profiler and the engine."""
