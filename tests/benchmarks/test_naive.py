"""The contiguous baseline is a fair one: the same tokens, one buffer for each Sequence, and nothing that only pages can do."""

import pytest
from tokenizers import Tokenizer

from benchmarks import naive
from benchmarks.harness import CHUNK, Subject, make_jobs, paged, pages_needed, run_jobs
from engine.errors import RequestTooLarge

MAX_LENGTH = 384
LENGTHS = [(CHUNK + 44, 20), (5, 30), (100, 8), (CHUNK, 3), (1, 25)]


@pytest.fixture(scope="module")
def subject(tiny_folder, tiny_model):
    return Subject(tiny_model, Tokenizer.from_file(str(tiny_folder / "tokenizer.json")))


def test_it_gives_the_tokens_that_pages_give(subject):
    jobs = make_jobs(subject, LENGTHS)
    with paged(subject, jobs, sum(map(pages_needed, jobs)))() as run:
        expected = run().tokens
    assert len({tuple(tokens[:3]) for tokens in expected.values()}) == len(jobs)
    for buffers in (2, len(jobs)):
        assert run_jobs(naive.make_engine(subject, buffers, MAX_LENGTH), jobs).tokens == expected


def test_a_sequence_has_one_buffer_from_its_admission_to_its_end(subject):
    engine = naive.make_engine(subject, 2, MAX_LENGTH)
    tables: dict[str, list[list[int]]] = {}

    def look():
        for sequence_id, table in engine.cache.page_tables.items():
            tables.setdefault(sequence_id, []).append(list(table))
        taken = [buffer for table in engine.cache.page_tables.values() for buffer in table]
        assert len(set(taken)) == len(taken) <= 2
        assert engine.cache.gpu_manager.used_count == len(taken)  # nothing is kept of those that have gone
        engine.check()

    run = run_jobs(engine, make_jobs(subject, LENGTHS), look)
    assert all(len(table) == 1 and table == seen[0] for seen in tables.values() for table in seen)
    assert max(run.num_running) == 2
    assert run.swapped_out == run.dropped == run.stats.found_on_device == 0


def test_a_buffer_is_one_extent_for_the_greatest_length(subject):
    engine = naive.make_engine(subject, 3, MAX_LENGTH)
    buffer = engine.cache.device.tensor[1]
    assert buffer.is_contiguous()
    assert buffer.numel() * buffer.element_size() == subject.model.geometry(MAX_LENGTH).page_bytes
    assert buffer.stride(2) == subject.model.num_kv_heads * subject.model.head_dim  # a layer's keys lie token after token


def test_it_refuses_what_no_buffer_holds(subject):
    engine = naive.make_engine(subject, 4, MAX_LENGTH)
    engine.add(make_jobs(subject, [(MAX_LENGTH - 20, 20)])[0])
    with pytest.raises(RequestTooLarge):
        engine.add(make_jobs(subject, [(1, 1), (MAX_LENGTH - 20, 21)])[1])
