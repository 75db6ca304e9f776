"""OpenAI's endpoints over the same jobs. Each is a ``Surface``: bodies to jobs, and what jobs made to bodies."""
