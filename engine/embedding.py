"""The engine inside a program of your own: one model, two pools, ``generate``. No Redis, no server, nothing durable."""

from dataclasses import replace

from tokenizers import Tokenizer

from engine import model_source
from engine.assembly import make_residency
from engine.core import Engine
from engine.model import load_model
from engine.pools import DevicePool, HostPool, MemoryBacking
from engine.runner import make_runner
from engine.sampler import SamplingParams
from engine.scheduler import Budget
from engine.sequence import Request
from engine.threads import default_threads

GREEDY = SamplingParams(temperature=0.0, seed=0)


class PagedInferenceEngine:
    """Generates text with a paged KV cache.

    ``model_name`` is a folder, a Hugging Face id, or ``demo`` (SmolLM2-135M-Instruct). The pools hold ``gpu_pages`` pages on the
    compute device and ``cpu_pages`` in host memory, of ``page_size`` token slots each. Raises what ``engine.errors`` names: an
    encoder-decoder or a recurrent model is refused by name, not served wrongly.
    """

    def __init__(
        self,
        model_name: str = "demo",
        gpu_pages: int = 256,
        cpu_pages: int = 1024,
        page_size: int = 16,
        *,
        prefill_chunk: int = 256,
        threads: int | None = None,
    ) -> None:
        folder = model_source.resolve(model_name)
        model = load_model(folder, threads=threads or default_threads())
        geometry = model.geometry(page_size)
        self.page_size = page_size
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        host = HostPool(cpu_pages, geometry, MemoryBacking(cpu_pages, geometry.page_bytes))
        residency = make_residency(DevicePool(gpu_pages, geometry), host, prefill_chunk=prefill_chunk, reserve=cpu_pages // 8)
        self.cache = residency.cache
        self._max_context = model.max_context
        self.engine = Engine(
            make_runner(model, self.cache.device.tensor, page_size, prefill_chunk),
            residency,
            self.tokenizer,
            Budget(max_running=16, max_step_rows=64, max_step_tokens=2 * prefill_chunk, prefill_chunk=prefill_chunk),
            max_context=model.max_context,
            eos_token_ids=frozenset(model.eos_token_ids),
        )
        self._count = 0

    def generate(self, prompt: str, max_new_tokens: int = 32, *, sampling: SamplingParams = GREEDY) -> str:
        """Continue ``prompt`` by at most ``max_new_tokens`` tokens; the new text alone. Greedy unless ``sampling`` is given."""
        return self.generate_all([prompt], max_new_tokens, sampling=sampling)[0]

    def generate_all(self, prompts: list[str], max_new_tokens: int = 32, *, sampling: SamplingParams = GREEDY) -> list[str]:
        """Continue several prompts in one batch; each gets what it would get alone, bit for bit."""
        texts: dict[str, str] = {}
        for index, prompt in enumerate(prompts):
            self._count += 1
            sequence_id = f"sequence-{self._count}"
            prompt_ids = tuple(self.tokenizer.encode(prompt).ids)
            limit = min(max_new_tokens, self._max_context - len(prompt_ids))
            params = replace(sampling, seed=sampling.seed + index) if sampling.temperature else sampling
            self.engine.add(Request(sequence_id, prompt_ids, params, limit, order=self._count))
            texts[sequence_id] = ""
        try:
            while self.engine.has_work:
                result = self.engine.step()
                for failure in result.failures:
                    raise failure.error
                for output in result.outputs:
                    texts[output.sequence_id] += output.text
        finally:
            for sequence_id in texts:
                self.engine.abort(sequence_id)
        return list(texts.values())
