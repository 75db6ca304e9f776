"""Durable state: job records and token logs in Redis, KV pages in a memory-mapped safetensors file. See DESIGN.md."""
