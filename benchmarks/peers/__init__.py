"""Our engine beside Hugging Face transformers, vLLM and llama.cpp, in turns on the same cores. ``python -m benchmarks.peers``

Each peer is a process of its own, run by the python of its own environment, that loads the model once and then answers requests
(``protocol``). Decode and prefill are measured apart, and each figure stands beside what the machine allowed in the same round
(``limits``).
"""
