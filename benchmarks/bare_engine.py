"""The engine alone in a process: no Redis, no pool file, no HTTP. Work comes as JSON lines on stdin, times go out on stdout."""

import json
import sys

from benchmarks.harness import Subject, make_budget, make_job, run_jobs
from engine import model_source

PAGES = 1024


def main() -> None:
    subject = Subject.load(model_source.resolve(sys.argv[1]))
    engine = subject.engine(subject.residency(subject.pool(PAGES)), make_budget())
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        jobs = [make_job(order, prompt, work["max_tokens"]) for order, prompt in enumerate(work["prompts"])]
        run = run_jobs(engine, jobs)
        print(json.dumps({"seconds": run.seconds, "tokens": list(run.tokens.values())}), flush=True)


if __name__ == "__main__":
    main()
