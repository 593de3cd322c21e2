"""Records as text: nothing here measures."""
