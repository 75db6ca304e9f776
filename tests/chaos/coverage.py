"""``python -m tests.chaos.coverage > docs/chaos.md``: who tries what can go wrong, S1 to S41: chaos scenarios, and tests.

Which scenarios do stands in ``covers`` of each; which tests do stands here. ``test_coverage.py`` proves that all of it is there.
"""

from dataclasses import dataclass

from chaos.scenarios import SCENARIOS

_HEAD = """# What is tried to break it

Forty-one kinds of trouble, and who makes them. Scenarios run against real processes in `make chaos TIER=ci`
([how](../chaos/README.md)): behind each stands how many clusters of its own it gets there, and how often its script inflicts its
faults in each (some inflict several at a time: the report of a run counts them one by one). Tests run in `make test`. What nobody
tries says so.

Made by `python -m tests.chaos.coverage > docs/chaos.md`.

| | trouble | chaos scenarios | tests | not tried |
| --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True, slots=True)
class Trouble:
    """``open`` is not tried by anybody; ``without_scenario`` neither, as long as no scenario covers this."""

    what: str
    tests: tuple[str, ...] = ()  #: path, or path::test
    open: str = ""
    without_scenario: str = ""


_ENGINE, _STORAGE, _SERVICE, _API = "tests/engine/", "tests/storage/", "tests/service/", "tests/service/api/"
_SIMULATION = "tests/simulation/test_simulation.py"
_LOOP, _POOL, _FAULTS = _SERVICE + "test_engine_loop.py", _STORAGE + "test_pool_file.py", _STORAGE + "test_redis_faults.py"

TROUBLES = {
    "S1": Trouble(
        "engine SIGKILL at every named point",
        (_SIMULATION, _STORAGE + "test_small_parts.py::test_every_listed_point_is_hit_somewhere"),
    ),
    "S2": Trouble("engine SIGKILL at random times under load", (_LOOP + "::test_a_chain_of_crashes", _SIMULATION)),
    "S3": Trouble(
        "kill between a commit's request and its reply",
        (
            _LOOP + "::test_lost_calls_and_lost_replies_change_nothing",
            _FAULTS + "::test_a_reply_that_is_cut_never_reaches_the_next_caller",
        ),
    ),
    "S4": Trouble("crashes during recovery, one after the other", (_LOOP + "::test_a_chain_of_crashes", _SIMULATION)),
    "S5": Trouble("api alone, engine alone, both"),
    "S6": Trouble(
        "supervisor SIGKILL: its children die",
        (
            _SERVICE + "test_supervisor.py::test_kill_9_takes_engine_and_api_along_and_leaves_redis_for_the_next",
            _SERVICE + "test_processes.py::test_children_die_when_the_parent_is_killed",
        ),
    ),
    "S7": Trouble(
        "OOM kill of the engine",
        (_SERVICE + "test_processes.py::test_a_real_oom_kill_is_seen",),
        without_scenario="a whole service whose engine is killed for memory",
    ),
    "S8": Trouble(
        "SIGTERM while busy, a second one, a drain that takes too long",
        (
            _SERVICE + "test_supervisor.py::test_a_second_signal_ends_at_once",
            _SERVICE + "test_supervisor.py::test_a_child_that_does_not_end_is_killed_after_the_drain",
            _LOOP + "::test_drain_gives_everything_back_and_the_next_life_goes_on_from_pages",
            _SERVICE + "test_restarts.py::test_sigterm_to_serve_under_load",
            _SERVICE + "test_restarts.py::test_the_api_is_replaced_five_times_and_no_client_notices",
        ),
    ),
    "S9": Trouble(
        "Redis SIGKILL",
        (
            _FAULTS + "::test_kills_under_load_lose_and_repeat_nothing",
            _API + "test_outages.py::test_kill_9_of_redis_is_a_pause_for_open_streams",
        ),
    ),
    "S10": Trouble("engine and Redis killed at once"),
    "S11": Trouble(
        "SIGSTOP past the lease, take over, SIGCONT",
        (_LOOP + "::test_an_engine_declared_dead_starts_over_and_nothing_runs_twice", "tests/model/test_protocol.py", _SIMULATION),
        "the freezer of a control group",
    ),
    "S12": Trouble(
        "Redis stopped, loading, busy with a script",
        (
            _FAULTS + "::test_a_busy_script_is_not_ready",
            _SERVICE + "test_redis_server.py::test_a_stopped_server_is_waited_for_and_never_replaced",
            _API + "test_outages.py::test_a_redis_that_hangs_is_a_pause_too",
        ),
        "a file so large that it loads for seconds",
    ),
    "S13": Trouble(
        "append-only file cut, zeroed, flipped, gone, deleted while live, put back from a copy",
        (
            _STORAGE + "test_damaged_files.py",
            _SERVICE + "test_redis_server.py::test_a_deleted_log_is_noticed",
            _FAULTS + "::test_a_store_that_went_back_is_refused_at_the_next_connection",
        ),
        "a bit flipped in the text beside a token: no hash covers it, so it would be shown",
    ),
    "S14": Trouble(
        "no memory left in Redis; a policy that evicts",
        (
            _FAULTS + "::test_out_of_memory_is_a_pause_and_changes_nothing",
            _FAULTS + "::test_submits_stop_at_eighty_percent_while_commits_go_on",
            _FAULTS + "::test_a_weak_one_is_named_with_its_fix",
        ),
    ),
    "S15": Trouble(
        "Redis read-only, emptied, another run, without scripts, with a stranger's key",
        (
            _STORAGE + "test_redis_strangers.py",
            _FAULTS + "::test_they_are_loaded_again_after_a_flush",
            _FAULTS + "::test_a_flushall_is_noticed_on_a_living_connection",
        ),
        "Redis ends because its own disk fails while it runs",
    ),
    "S16": Trouble(
        "clocks that step",
        (
            _SERVICE + "test_lease.py",
            _STORAGE + "test_contract_clients.py::test_stops_when_the_clock_seems_to_have_jumped",
            _STORAGE + "test_rewrite.py::test_a_time_ahead_of_the_clock_is_not_waited_for",
        ),
        without_scenario="a whole service under a clock that steps",
    ),
    "S17": Trouble(
        "network that delays, cuts, crumbles, repeats, goes silent",
        (
            _LOOP + "::test_lost_calls_and_lost_replies_change_nothing",
            _STORAGE + "test_contract_engines.py::test_every_write_sent_twice_leaves_the_same_state",
            _SIMULATION,
        ),
    ),
    "S18": Trouble(
        "partitions, also of one direction",
        (_API + "test_outages.py::test_a_redis_that_hangs_is_a_pause_too", _SIMULATION),
        without_scenario="packets that are really dropped between processes that live",
    ),
    "S19": Trouble(
        "bits flipped in the pool file",
        (
            "tests/recovery/test_checkpointer.py::test_a_flipped_bit_is_found_and_its_page_recomputed",
            _POOL + "::test_a_flipped_bit_is_found",
            _STORAGE + "test_fuzz.py::test_a_pool_header_is_one_that_we_would_have_written_or_is_refused",
        ),
    ),
    "S20": Trouble("whole pages in each other's place, pages of an old life", (_SIMULATION,)),
    "S21": Trouble(
        "leaks over many jobs, cancels and crashes",
        (
            _ENGINE + "test_engine.py::test_abort_gives_every_page_back_at_once",
            _ENGINE + "test_residency.py::test_an_abort_leaves_the_free_counts_exact",
            _SERVICE + "test_purge.py",
        ),
    ),
    "S22": Trouble(
        "a full disk",
        (
            _POOL + "::test_a_full_disk_leaves_nothing_behind",
            _POOL + "::test_a_small_tmpfs",
            _SERVICE + "test_redis_server.py::test_a_full_disk_at_start_is_said_in_these_words",
        ),
    ),
    "S23": Trouble("a slow disk", (), "a slow disk under Redis itself"),
    "S24": Trouble(
        "a disk that fails to write, to sync, to read",
        (
            _POOL + "::test_one_failed_sync_poisons_for_good",
            _POOL + "::test_errors_of_single_pages_are_pool_errors",
            "tests/recovery/test_checkpointer.py::test_a_failed_copy_is_never_published",
            _SIMULATION,
        ),
    ),
    "S25": Trouble(
        "streams that drop at every event; right, old, impossible and garbage cursors",
        (
            _API + "test_events.py::test_a_client_that_drops_at_every_event_and_comes_back_with_any_cursor",
            _API + "test_events.py::test_resume_at_every_position_gives_exactly_the_rest",
            _API + "test_fuzz.py::test_any_cursor_in_the_header",
            _SERVICE + "test_client.py",
        ),
    ),
    "S26": Trouble(
        "cancel against finish against crash",
        (
            _STORAGE + "test_contract_clients.py::test_cancel_is_terminal_at_once_in_any_state",
            _STORAGE + "test_agreement.py",
            _SIMULATION,
        ),
    ),
    "S27": Trouble(
        "a poison job among good ones",
        (
            _STORAGE + "test_contract_engines.py::test_three_blamed_deaths_without_progress_are_poison",
            _ENGINE + "test_engine.py::test_a_suspect_takes_its_next_step_alone",
        ),
    ),
    "S28": Trouble(
        "malformed and huge input",
        (
            _API + "test_fuzz.py",
            _API + "test_limits.py",
            _API + "test_schema.py",
            _API + "test_jobs.py::test_bad_input_is_refused_with_the_name_of_the_field",
            _SERVICE + "test_settings_fuzz.py",
        ),
    ),
    "S29": Trouble(
        "second starts on one directory, one pool, one Redis",
        (
            _SERVICE + "test_supervisor.py::test_a_second_supervisor_is_refused_with_the_first_ones_pid",
            _POOL + "::test_exclusive_between_processes_and_gone_with_the_holder",
            _SERVICE + "test_redis_server.py::test_a_second_starter_attaches",
        ),
    ),
    "S30": Trouble("five hundred jobs to recover at once"),
    "S31": Trouble(
        "power loss of Redis and pool together",
        (_SIMULATION, _STORAGE + "test_store_file.py::test_killed_while_saving_it_is_the_old_or_the_new"),
    ),
    "S32": Trouble(
        "another model, tokenizer, number format, page size between two lives",
        (
            _ENGINE + "test_model_source.py::test_the_fingerprint_changes_with_all_that_may_change_an_answer",
            _POOL + "::test_another_one_gets_a_new_pool",
            "tests/recovery/test_plan.py::test_jobs_of_another_model_wait_and_none_is_failed",
            _STORAGE + "test_contract_engines.py::test_another_model_is_refused_while_jobs_are_listed",
        ),
    ),
    "S33": Trouble(
        "formats of other versions: older, newer, with unknown fields",
        ("tests/formats/test_formats.py", _LOOP + "::test_a_job_of_a_newer_version_fails_alone"),
    ),
    "S34": Trouble(
        "what sampling needs, across a crash at each token",
        ("tests/recovery/test_sampling_state.py", _ENGINE + "test_detokenizer.py"),
    ),
    "S35": Trouble(
        "one Idempotency-Key many times, with crashes between",
        (
            _API + "test_jobs.py::test_fifty_at_once_with_one_key_make_one_job",
            _API + "test_jobs.py::test_a_submit_whose_reply_was_lost_is_sent_again",
            _STORAGE + "test_contract_clients.py::test_idempotency_key",
        ),
    ),
    "S36": Trouble(
        "slow and silent clients",
        (
            _API + "test_limits.py::test_a_head_that_does_not_come_is_not_waited_for",
            _API + "test_events.py::test_a_slow_reader_reads_on_from_the_log",
            _API + "test_outages.py::test_a_client_that_reads_nothing_does_not_hold_up_the_end",
        ),
        without_scenario="hundreds of them at once beside an engine that works",
    ),
    "S37": Trouble(
        "no descriptors, no folder for temporary files, umask 000, a directory that cannot be written",
        (
            _SERVICE + "test_private.py::test_every_file_and_folder_is_ours_alone",
            _SERVICE + "test_files.py",
            _SERVICE + "test_processes.py::test_directories_are_private_and_refusals_name_them",
        ),
        without_scenario="no descriptors left; a directory that becomes read-only",
    ),
    "S38": Trouble(
        "a step that raises; logits that are no numbers, or of another shape",
        (_ENGINE + "test_sampler_engine.py", _LOOP + "::test_a_model_that_gives_no_number_for_a_job_fails_it_alone"),
    ),
    "S39": Trouble(
        "a long mix of everything with other settings at each start",
        (_SIMULATION,),
        without_scenario="half an hour of it on real processes",
    ),
    "S40": Trouble(
        "`midsentence verify` after everything: it is part of every run of every scenario",
        (_SERVICE + "test_verify.py", _STORAGE + "test_audit.py"),
    ),
    "S41": Trouble(
        "a GPU",
        (_ENGINE + "test_cuda.py", _ENGINE + "test_cuda_logic.py", _ENGINE + "test_cuda_swap_logic.py"),
        "kills of a service on a GPU; the first of these tests need a device and are skipped without",
    ),
}


def scenarios_of(number: str) -> list[str]:
    """As the table shows them."""
    covering = (scenario for scenario in SCENARIOS if number in scenario.covers.split())
    return [f"`{scenario.name}` {scenario.runs['ci']}×{scenario.faults['ci']}" for scenario in covering]


def page() -> str:
    rows = []
    for number, trouble in TROUBLES.items():
        scenarios = scenarios_of(number)
        tests = (f"[{_short(test)}](../{test.partition('::')[0]})" for test in trouble.tests)
        not_tried = [trouble.open, "" if scenarios else trouble.without_scenario]
        cells = (number, trouble.what, ", ".join(scenarios), ", ".join(tests), "; ".join(filter(None, not_tried)))
        rows.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(rows)


def _short(test: str) -> str:
    path, _, name = test.partition("::")
    return name.removeprefix("test_").replace("_", " ") or path.removeprefix("tests/").removesuffix(".py").replace("test_", "")


if __name__ == "__main__":
    print(page(), end="")
