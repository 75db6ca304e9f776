"""The engine process: claims jobs, steps the engine, commits, and gives everything back when told to end."""
