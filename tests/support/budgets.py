"""How many programs the engines of a test file may have in the default run (`tests/support/costs.py`).

Tracing, lowering and compiling a program takes about a second, unless an engine of `tests/support/engines.py` in the
same process has it. What the engines have that several files share is counted apart.
"""

USUAL = 8
BUDGETS = {
    "tests/bench/test_report.py": 12,  # of the command's two engines, each for two batch sizes
    "tests/bench/test_serve.py": 23,
    "tests/draft/test_beside.py": 22,
    "tests/draft/test_dflash_windows.py": 11,
    "tests/draft/test_draft_vocab.py": 17,
    "tests/draft/test_draft_window.py": 17,
    "tests/draft/test_gemma4_assistant.py": 42,
    "tests/draft/test_hybrid_mtp.py": 15,
    "tests/draft/test_mtp.py": 18,
    "tests/draft/test_padded_vocabulary.py": 22,
    "tests/draft/test_uno.py": 56,
    "tests/draft/test_peagle.py": 13,
    "tests/engine/test_adapters.py": 54,
    "tests/engine/test_adaptive_engine.py": 47,
    "tests/engine/test_beside_heads.py": 42,
    "tests/engine/test_budget_engine.py": 37,
    "tests/engine/test_core.py": 12,
    "tests/engine/test_deterministic.py": 16,
    "tests/engine/test_distribution.py": 15,
    "tests/engine/test_draft_device.py": 40,
    "tests/engine/test_family_drafts.py": 31,
    "tests/engine/test_family_engines.py": 29,
    "tests/engine/test_family_pairs.py": 19,  # two families, one of which keeps states by slot
    "tests/engine/test_given_device.py": 9,
    "tests/engine/test_grammar_decoding.py": 13,
    "tests/engine/test_hybrids.py": 52,
    "tests/engine/test_known_programs.py": 11,
    "tests/engine/test_lossless.py": 19,
    "tests/engine/test_output_processor.py": 9,
    "tests/engine/test_packed_prompts.py": 58,
    "tests/engine/test_penalties_decoding.py": 9,
    "tests/engine/test_predictions.py": 26,
    "tests/engine/test_prefix.py": 53,
    "tests/engine/test_program_choice.py": 91,
    "tests/engine/test_replicas.py": 14,
    "tests/engine/test_shared_keys.py": 21,
    "tests/engine/test_tensor_parallel.py": 64,
    "tests/engine/test_thinking.py": 41,
    "tests/engine/test_update_weights.py": 60,
    "tests/engine/test_updated_drafters.py": 60,
    "tests/rollouts/test_grpo.py": 10,
    "tests/rollouts/test_tunix.py": 82,
    "tests/train/test_log_probs.py": 18,
    "tests/train/test_online.py": 13,
    "tests/faults/test_nan_logits.py": 13,
    "tests/models/test_fp8_experts.py": 12,
    "tests/models/test_int4_checkpoints.py": 17,
    "tests/sampling/test_logprobs.py": 16,
    "tests/server/test_tool_grammar.py": 10,
    "tests/step/test_golden.py": 9,
    "tests/step/test_memory.py": 16,
    "tests/step/test_split_decode.py": 53,
    "tests/tools/test_check_head.py": 10,
    "tests/tools/test_demo.py": 9,
    "tests/tools/test_drafter_table.py": 20,  # one drafter, and none, with all kinds of requests at once
    "tests/tools/test_readmes.py": 30,  # the examples of the pages run
    "tests/tools/test_testing.py": 14,
    "tests/train/test_regenerate.py": 17,
    "tests/train/test_run.py": 15,
}
