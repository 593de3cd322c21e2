"""Records of decodes: collecting, storing, rendering. Imports the engine, never ComfyUI."""
