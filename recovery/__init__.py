"""The only translator between what is durable (storage) and what computes (engine)."""
