"""Sweeps with a language model: a Llama of some thousand random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lab.tests.study.experiments.arms import tiny
from pulsesync_lab.demo.language import ANSWER, LanguageModel
from pulsesync_lab.study.experiments import loop, runner
from pulsesync_lab.study.recording import Recording

transformers = pytest.importorskip(
    "transformers", reason="NOT TESTED: language models need pip install 'pulsesync-lab[llm]'"
)

SYMBOLS = ["<end>", "<pad>", "<user>", *"0123456789", "+", "?", " ", "-", "="]
END, PAD = 0, 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    import tokenizers

    path = tmp_path_factory.mktemp("llama")
    table = tokenizers.Tokenizer(tokenizers.models.WordLevel({s: i for i, s in enumerate(SYMBOLS)}, unk_token="<user>"))
    table.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), behavior="isolated")
    table.decoder = tokenizers.decoders.Fuse()
    table.add_special_tokens(["<end>", "<pad>", "<user>"])
    template = "{% for message in messages %}<user>{% endfor %}"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=table, eos_token="<end>", pad_token="<pad>", chat_template=template
    ).save_pretrained(path)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    "changes",
    [{}, {"algorithm": "grpo", "delay": 1, "updates": 2}, {"masters": "bf16"}, {"masters": "rounded", "delay": 1}],
    ids=str,
)
def test_an_arm_is_recorded(changes: dict[str, Any], folder: str, tmp_path: Path) -> None:
    arm = tiny(game="language", model=folder, **changes)
    loop.train(arm, 0, tmp_path / "a.jsonl", tmp_path)
    recording = Recording.read(tmp_path / "a.jsonl")
    assert len(recording.steps) == 3
    assert "model.embed_tokens.weight" in {tensor.name for tensor in recording.header.tensors}
    if arm.algorithm == "sft":
        assert all(step.all_changed for step in recording.steps)


def test_what_is_shown_says_the_sum_and_ends(folder: str) -> None:
    game = LanguageModel(folder, group=4, device="cpu")
    shown = game.show(2, 0)
    assert len(shown.tokens) == 8
    for row in shown.tokens.tolist():
        text = "".join(SYMBOLS[token] for token in row)
        asked, said = text[: -text[::-1].index("=")], text[-text[::-1].index("=") :]
        a, b = (int(number) for number in asked.split(">")[-1].rstrip("= ").split(" + "))
        assert said.startswith(f" {a + b}<end>")
    counted = game.counted(shown.tokens)
    assert (counted.sum(dim=1) == 5).logical_or(counted.sum(dim=1) == 4).all()
    assert shown.log_probabilities.shape == (8, ANSWER)


def test_a_model_learns_what_it_is_shown(folder: str) -> None:
    from pulsesync_lab.study.experiments.learners import make_learner

    arm = tiny(game="language", model=folder)
    game = LanguageModel(folder, 4, "cpu")
    policy = game.policy()
    learner = make_learner(arm, game, policy, torch.optim.AdamW(policy.parameters(), lr=1e-2))
    losses = [float(learner.prepare(game.show(4, 0))()) for _ in range(15)]
    assert losses[-1] < 0.8 * losses[0]


def test_a_sweep_runs_on_a_model(folder: str, tmp_path: Path) -> None:
    (one,) = runner.choose(["warm-up"], model=folder, quick=True, steps=2)
    runner.run([one], tmp_path)
    page = (tmp_path / one.name / "results.md").read_text()
    assert all(f"| {arm.name} |" in page for arm in one.arms)
