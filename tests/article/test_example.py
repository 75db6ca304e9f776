"""The article's example, with the demo model: real text, and the counts that it prints."""

import pytest

from engine import PagedInferenceEngine, model_source
from engine.errors import ModelNotFound, UnsupportedModel
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def demo_model():
    try:
        return str(model_source.resolve("demo"))
    except ModelNotFound as error:
        pytest.skip(str(error))


@pytest.mark.model
def test_the_example_runs(demo_model):
    engine = PagedInferenceEngine(model_name=demo_model, gpu_pages=128, cpu_pages=512, page_size=16)
    result = engine.generate("The capital of France is", max_new_tokens=16)
    assert "Paris" in result
    # What was computed stays as cache until somebody needs its page: here the one page that became full.
    assert engine.cache.gpu_manager.used_count == 1
    assert engine.cache.gpu_manager.free_count == 127
    assert engine.engine.residency.available == 128
    assert engine.cache.cpu_manager.used_count == 1
    assert engine.cache.cpu_manager.free_count == 511


@pytest.mark.model
def test_it_gives_what_transformers_gives(demo_model):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts = ["The capital of France is", "Once upon a time, in a small village by the sea,", "def fibonacci(n):"]
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    expected = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(**ids, max_new_tokens=24, do_sample=False)
        expected.append(tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True))
    engine = PagedInferenceEngine(model_name=demo_model, gpu_pages=64, cpu_pages=64)
    assert engine.generate_all(prompts, max_new_tokens=24) == expected


def test_the_articles_encoder_decoder_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedModel, match="(?i)t5"):
        PagedInferenceEngine(model_name=str(make_tiny_model(tmp_path / "t5", "t5")))
