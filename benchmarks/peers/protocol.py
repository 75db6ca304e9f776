"""What a measured process speaks: JSON lines, requests on stdin, answers on stdout.

Standard library only: every peer's python runs it.

Nothing is measured by difference. A peer tells after each of its steps how many tokens every sequence has; the clock is read there.

- **Prefill** lasts from the request until every sequence has its first token.
- **Decode** lasts from then until one sequence has its last token. So all sequences of the batch decode all the time, and tokens
  that early sequences got while others were still in prefill count nowhere.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Message = dict[str, Any]
Prompts = list[list[int]]
#: Generates exactly that many tokens for each prompt, greedily. Yields tokens of each sequence so far: zeros when it is ready to
#: begin, where the clock starts, then after each step.
Generate = Callable[[Prompts, int], Iterator[Sequence[int]]]
Stamp = tuple[float, Sequence[int]]  #: seconds since anything, tokens of each sequence


def measure(stamps: Sequence[Stamp], new_tokens: int) -> Message:
    """``prefill_seconds``, ``decode_seconds`` and ``decode_tokens`` of a run.

    Raises ``ValueError`` when a sequence has not ``new_tokens`` tokens at the end.
    """
    if set(stamps[-1][1]) != {new_tokens}:
        raise ValueError(f"asked for {new_tokens} tokens for each sequence, got {list(stamps[-1][1])}")
    began, counts = next((time, counts) for time, counts in stamps if min(counts) >= 1)
    ended, last = next((time, counts) for time, counts in stamps if max(counts) == new_tokens)
    if ended < began:
        raise ValueError(f"a sequence had its {new_tokens} tokens before another had its first")
    return {
        "prefill_seconds": began - stamps[0][0],
        "decode_seconds": ended - began,
        "decode_tokens": sum(last) - sum(counts),
    }


def timed(generate: Generate) -> Callable[[Message], Message]:
    """Answers ``{"prompts": token ids, "new_tokens": n}`` with what ``measure`` tells, and ``cpu_seconds``."""

    def answer(request: Message) -> Message:
        cpu = time.process_time()
        stamps = [(time.perf_counter(), list(counts)) for counts in generate(request["prompts"], request["new_tokens"])]
        return {**measure(stamps, request["new_tokens"]), "cpu_seconds": time.process_time() - cpu}

    return answer


def serve(load: Callable[[], tuple[Callable[[Message], Message], Message]]) -> None:
    """Load, tell what was loaded, then answer until stdin ends. What fails is answered as ``{"error": ...}``."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a stopped process would outlive the one that stopped it
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; the pipe is ours
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # else their chatter comes after what it dies of

    def tell(message: Message) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        answer, about = load()
    except Exception as error:
        tell({"error": f"{type(error).__name__}: {error}"})
        return
    tell(about)
    for line in sys.stdin:
        try:
            tell(answer(json.loads(line)))
        except Exception as error:
            tell({"error": f"{type(error).__name__}: {error}"})
