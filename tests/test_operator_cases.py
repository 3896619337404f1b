"""What operators of other servers complained of, case by case: which test tries it here.

Numbers are those of the collection that the cases come from; ``CASES`` leads from each to its tests, and
``COMPLAINTS`` does so for the ten that recur most. The refusals among them are tried here, with the oracle of
``operator_oracle``; what comes out is in ``test_operator_cases_output``, what happens around it in
``test_operator_cases_service``.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxserve
from tests.operator_oracle import refused, well
from tests.serving import Server, events, serving

CONTEXT = 256
TESTS = Path(__file__).parent

OUTPUT, SERVICE, HERE = "operator_cases_output", "operator_cases_service", "operator_cases"
LATER: dict[int, str] = {
    28: "speculative decoding",
    68: "DeepSeek's scaling of rotary frequencies",
    76: "watermarks",
}
"""Cases of what is not built yet; what of them can be tried is in ``CASES``."""

CASES: dict[int, tuple[str, ...]] = {
    2: (f"{OUTPUT}::test_no_half_characters", "detokenizer::test_valid_text_never_shows_a_replacement_character"),
    4: ("tokenizer::test_sentencepiece_vocabulary", "tokenizer::test_a_piece_that_only_looks_like_a_byte_is_text"),
    6: ("streams::test_streams_say_what_whole_answers_say",),
    8: (f"{OUTPUT}::test_chunks_are_as_the_official_client_types_them",),
    10: (f"{OUTPUT}::test_nothing_of_a_stop_string_is_sent",),
    12: (f"{OUTPUT}::test_nothing_is_sent_twice",),
    14: (f"{OUTPUT}::test_what_stopped_it_is_the_same_by_every_path",),
    16: ("reasoning::test_stop_strings_apply_to_what_is_said",),
    18: (f"{OUTPUT}::test_scores_do_not_depend_on_their_order",),
    20: (f"{SERVICE}::test_two_hundred_scored_prompts_compile_and_leak_nothing",),
    22: (
        f"{OUTPUT}::test_log_probabilities_are_the_models_own",
        "sampler::test_log_probabilities_are_those_of_the_raw_logits",
    ),
    24: (
        f"{OUTPUT}::test_a_seed_gives_the_same_in_any_company",
        "sampler::test_a_rows_token_does_not_depend_on_its_company",
    ),
    26: (f"{OUTPUT}::test_no_top_k_is_not_one", "sampler::test_draws_follow_the_softmax"),
    28: (f"{OUTPUT}::test_a_penalty_has_an_effect",),
    30: (f"{HERE}::test_refusals",),
    32: (f"{HERE}::test_refusals", f"{OUTPUT}::test_as_many_as_the_best_of_may_be_streamed"),
    34: (f"{HERE}::test_refusals", f"{OUTPUT}::test_max_tokens_that_are_fine"),
    36: (f"{OUTPUT}::test_more_tokens_than_fit_are_cut_and_it_says_so",),
    38: (f"{HERE}::test_refusals",),
    40: (f"{HERE}::test_too_long_a_prompt_is_never_cut",),
    42: (
        "serve_trouble::test_health_answers_while_a_huge_prompt_is_tokenized",
        "soak::test_streams_and_disconnects_leave_a_server_as_it_was",
    ),
    44: (f"{HERE}::test_refusals",),
    46: (
        f"{HERE}::test_a_template_that_fails_is_the_requests_fault",
        f"{OUTPUT}::test_a_message_may_hold_content_and_calls",
    ),
    48: ("soak::test_five_hundred_random_requests_leave_nothing_behind",),
    50: (
        f"{SERVICE}::test_a_preempted_request_that_is_aborted_leaves_nothing",
        "tiers::test_hanging_up_while_pages_come_from_the_disk_leaves_nothing",
        "tiers::test_rounds_of_shared_beginnings_with_aborts_over_too_little_memory",
    ),
    52: (
        f"{SERVICE}::test_equal_request_ids_side_by_side",
        "guards::test_request_ids_are_echoed_where_sane_and_never_keys",
    ),
    54: (f"{SERVICE}::test_preemptions_are_few_and_told",),
    56: ("metrics::test_nonsense_neither_raises_nor_lowers_a_counter",),
    58: (
        "lifecycle::test_a_hung_engine_turns_health_red_and_is_ended_with_all_stacks",
        "lifecycle::test_the_death_of_the_engine_ends_the_process",
        "lifecycle::test_an_idle_engine_is_neither_stalled_nor_ended",
    ),
    60: ("guards::test_every_route_but_three_probes_and_the_page_wants_a_key",),
    62: (
        f"{HERE}::test_no_answer_outside_its_language",
        "grammar::test_what_cannot_be_enforced_is_refused_by_path_and_keyword",
    ),
    64: (
        f"{OUTPUT}::test_a_description_changes_nothing",
        "grammar::test_descriptions_do_not_matter_and_grammars_are_kept",
    ),
    66: (
        f"{OUTPUT}::test_calls_with_braces_and_without_arguments",
        "serve_chat_tools::test_calls_whole_and_streamed_are_the_same",
    ),
    68: (
        "rope::test_yarn",
        "rope::test_default_and_linear",
        "rope::test_llama3",
        f"{SERVICE}::test_no_scaling_lengthens_the_context",
    ),
    70: (
        "bad_input::test_a_head_that_is_there_is_used",
        "bad_input::test_a_tied_model_without_a_head_uses_its_embedding",
        "bad_input::test_a_bad_checkpoint_is_named",
    ),
    72: (
        "engine::test_the_same_tokens_after_preemptions",
        "prefix_engine::test_too_little_device_memory_changes_no_token",
        "tiers::test_rounds_of_shared_beginnings_with_aborts_over_too_little_memory",
        "tiers::test_a_damaged_record_is_dropped_and_computed_again",
        "tiers::test_damaged_pages_on_disk_are_computed_again",
        "tiers::test_a_restart_keeps_what_was_on_the_device_and_on_the_host",
        "disk::test_a_damaged_record_is_discarded_and_the_others_are_not",
    ),
    74: (
        "executables::test_the_second_build_loads",
        "executables::test_a_changed_environment_never_finds_the_old_one",
        "executables::test_a_damaged_entry_is_discarded_with_a_reason_and_rebuilt",
        "executables::test_an_engine_compiles_once_and_takes_of_another_model_what_serves_any",
    ),
    76: (f"{HERE}::test_refusals",),
}

COMPLAINTS: dict[str, tuple[str, ...]] = {
    "one bad request kills everybody": (
        f"{HERE}::test_refusals",
        "bad_input::test_a_bad_request_is_named_and_hurts_nobody",
        "fuzz_bodies::test_broken_bodies_are_answered_and_harm_nothing",
        f"{SERVICE}::test_equal_request_ids_side_by_side",
    ),
    "silent wrongness": (
        "bad_input::test_a_bad_checkpoint_is_named",
        "parity::test_reference_numbers",
        f"{HERE}::test_no_answer_outside_its_language",
    ),
    "health lies": CASES[58],
    "shutdown is abrupt": (
        "lifecycle::test_a_signal_drains",
        "lifecycle::test_draining_ends_at_the_deadline_or_the_second_signal",
    ),
    "start-up is slow and the cache does not help": CASES[74],
    "reproducibility": (
        "engine::test_the_same_tokens_in_any_company",
        "engine::test_the_same_tokens_from_any_engine",
        f"{OUTPUT}::test_a_seed_gives_the_same_in_any_company",
    ),
    "streaming text bugs": (*CASES[2], *CASES[10], *CASES[12], "detokenizer::test_the_tail_is_never_swallowed"),
    "4xx vs 5xx and opaque messages": (
        f"{HERE}::test_refusals",
        "guards::test_an_error_body_stays_small_whatever_is_quoted",
        "fuzz_api::test_random_requests_after_the_description_get_what_it_describes",
    ),
    "KV pressure": (*CASES[48], *CASES[50], *CASES[54]),
    "watermark and compliance": (f"{HERE}::test_refusals",),
}


def test_every_case_has_tests_that_exist() -> None:
    assert list(CASES) == list(range(2, 78, 2))
    assert len(COMPLAINTS) == 10
    assert set(LATER) <= set(CASES)
    names: dict[str, set[str]] = {}
    for test in {test for tests in (*CASES.values(), *COMPLAINTS.values()) for test in tests}:
        module, _, name = test.partition("::")
        if module not in names:
            tree = ast.parse((TESTS / f"test_{module}.py").read_text())
            names[module] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in names[module], test


@pytest.fixture(scope="module")
def server(llm: jaxserve.LLM) -> Iterator[Server]:
    with serving(llm, close_llm=False) as found:
        yield found


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "Hi", "max_tokens": 4} | fields


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4} | fields


def schema(given: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}


REFUSALS: list[tuple[int, tuple[str, dict[str, Any]], str]] = [
    (30, completion(stop_token_ids=[10**9], min_tokens=1), "stop_token_ids"),
    (30, completion(stop_token_ids=[256], min_tokens=1), "stop_token_ids"),
    (30, completion(stop_token_ids=[-1]), "stop_token_ids"),
    (30, completion(logit_bias={"256": 1}), "logit_bias"),
    (30, completion(allowed_token_ids=[10**9]), "allowed_token_ids"),
    (30, chat(stop_token_ids=[10**9], min_tokens=1), "stop_token_ids"),
    (32, completion(n=2, best_of=1), "best_of"),
    (32, completion(n=2, best_of=3, stream=True), "best_of"),
    (34, completion(max_tokens=-1), "max_tokens"),
    (34, completion(max_tokens=1e12), "max_tokens"),
    (34, completion(max_tokens="5"), "max_tokens"),
    (34, completion(max_tokens=5.0), "max_tokens"),
    (34, completion(max_tokens=True), "max_tokens"),
    (34, completion(max_tokens=0), "max_tokens"),
    (34, chat(max_tokens=None, max_completion_tokens="5"), "max_completion_tokens"),
    (34, chat(max_tokens=None, max_completion_tokens=-1), "max_completion_tokens"),
    (38, completion(prompt=""), "prompt"),
    (38, completion(prompt=[""]), "prompt"),
    (38, completion(prompt=["Hi", ""]), "prompt"),
    (38, completion(prompt=[]), "prompt"),
    (38, completion(prompt=[[]]), "prompt"),
    (38, completion(prompt=[[1], []]), "prompt"),
    (38, completion(prompt=None), "prompt"),
    (38, chat(messages=[]), "messages"),
    (44, chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
    (
        44,
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
        "response_format.json_schema.schema",
    ),
    (44, chat(response_format={"type": "odd"}), "response_format.type"),
    (44, chat(response_format={"type": "structural_tag"}), "response_format.type"),
    (44, chat(response_format=5), "response_format"),
    (44, chat(structured_outputs={"structural_tag": None}), "structured_outputs"),
    (44, chat(structured_outputs={}), "structured_outputs"),
    (44, chat(structured_outputs={"regex": "("}), "structured_outputs.regex"),
    (44, chat(structured_outputs={"choice": []}), "structured_outputs.choice"),
    (44, chat(structured_outputs={"grammar": "start: "}), "structured_outputs.grammar"),
    (62, chat(response_format=schema({"type": "string", "pattern": "(?=x)"})), "response_format.json_schema.schema"),
    (62, chat(response_format=schema({"not": {}})), "response_format.json_schema.schema"),
    (62, chat(response_format=schema({"$ref": "#/$defs/absent"})), "response_format.json_schema.schema"),
    (76, completion(watermarking={"key": 1}), "watermarking"),
    (76, chat(watermark=True), "watermark"),
]


@pytest.mark.parametrize(("case", "sent", "param"), REFUSALS, ids=lambda value: repr(value)[:60])
def test_refusals(server: Server, case: int, sent: tuple[str, dict[str, Any]], param: str) -> None:
    assert case in CASES
    message = refused(server, *sent, param=param)
    assert param.rpartition(".")[2] in message


def test_too_long_a_prompt_is_never_cut(server: Server) -> None:
    """Case 40: ten contexts, as text, as ids, as a conversation with tools: counts and the limit, in words."""
    long = CONTEXT * 10
    for path, body in (
        completion(prompt="x" * long),
        completion(prompt=[120] * long),
        completion(prompt="x" * CONTEXT, max_tokens=1),
        completion(prompt="x" * (CONTEXT + 1), max_tokens=0, echo=True),
        chat(messages=[{"role": "user", "content": "x" * long}]),
        chat(messages=[{"role": "system", "content": "S"}, *[{"role": "user", "content": "x" * 40}] * 60]),
        chat(
            messages=[{"role": "user", "content": "x" * 50}],
            tools=[{"type": "function", "function": {"name": "f", "description": "x" * long}}],
        ),
    ):
        message = refused(server, path, body, code="context_length_exceeded")
        assert str(CONTEXT) in message
    exact = server.send("/v1/completions", {"prompt": "x" * (CONTEXT - 1), "max_tokens": 5, "ignore_eos": True})
    assert exact[1]["usage"]["prompt_tokens"] == CONTEXT - 1
    assert exact[1]["usage"]["completion_tokens"] == 1
    well(server)


def test_a_template_that_fails_is_the_requests_fault(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 46: whatever a chat template does."""
    for source in ("{{ 1 / 0 }}", "{{ messages[0].odd.deep }}", "{{ raise_exception('roles must alternate') }}"):
        with monkeypatch.context() as patch:
            patch.setattr(server.llm.tokenizer, "chat_template", source)
            status, answer, _ = server.send(*chat())
        assert (status, answer["error"]["param"]) == (400, "messages"), (source, answer)
        assert "the chat template failed" in answer["error"]["message"]
    well(server)


def test_no_answer_outside_its_language(server: Server) -> None:
    """Case 62: patterns that elsewhere compiled to nothing are held, or refused; never let go."""
    for pattern in (
        r"^x\\!$",
        r"^\\\\$",
        r"^[\]\\]{2}$",
        "^\u00e9{3}$",
        r"^\d{3}\.\d$",
        r"^(a|b)*c$",
        "^$|^ab$",
        r"^\u0041$",
    ):
        body = chat(
            response_format=schema({"type": "string", "pattern": pattern}), max_tokens=40, temperature=1.5, seed=1
        )
        status, answer, _ = server.send(*body)
        if status == 400:
            assert "pattern" in answer["error"]["message"]
            continue
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            assert re.search(pattern, json.loads(choice["message"]["content"])), (pattern, choice)
    well(server)


def test_a_grammar_that_explodes_on_the_way_is_the_requests_fault(server: Server) -> None:
    """Complaint 1: one that compiles, and that nobody can follow for long; a 400, or an event in a stream."""
    grammar = {"structured_outputs": {"grammar": 'start: a\na: "x" | a a | a a a'}, "logit_bias": {"2": -100}}
    body = {"prompt": "Hi", "max_tokens": None} | grammar
    assert "too complex" in refused(server, "/v1/completions", body, code="impossible_request")
    status, text, _ = server.send("/v1/completions", body | {"stream": True})
    assert status == 200
    last = events(text)[-1]
    assert last["error"]["type"] == "invalid_request_error"
    assert "too complex" in last["error"]["message"]
    well(server)
