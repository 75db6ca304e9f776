"""The HTTP side: stateless, never imports torch, talks to engines through the job store only."""
