"""A language model as a game, with a checkpoint of 30,000 random weights; some seconds, most of them imports."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pulsesync.errors import PulseError
from pulsesync.state.modules import tensors_of
from pulsesync_lab.demo import language
from pulsesync_lab.demo.grpo import Rollouts
from pulsesync_lab.demo.language import ANSWER, LanguageModel, first_integer
from pulsesync_lab.demo.sync import values

transformers = pytest.importorskip("transformers", reason="NOT TESTED: needs pip install 'pulsesync-lab[llm]'")

SYMBOLS = ["<end>", "<pad>", "<sys>", "<user>", "<bot>", "<unk>", "⑪", *"0123456789", "+", "?", " ", "-", "="]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}<user>{{ message.content }}{% else %}<sys>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
END, PAD = 0, 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama of two layers with tied embeddings, and a tokenizer for which numbers have one token or two."""
    import tokenizers

    path = tmp_path_factory.mktemp("checkpoint")
    vocabulary = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    table = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    table.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), behavior="isolated")
    table.normalizer = tokenizers.normalizers.Replace("11", "⑪")
    table.decoder = tokenizers.decoders.Fuse()
    table.add_special_tokens([symbol for symbol in SYMBOLS if symbol.startswith("<")])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=table, eos_token="<end>", pad_token="<pad>", unk_token="<unk>", chat_template=TEMPLATE
    ).save_pretrained(path)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def game(folder: str) -> LanguageModel:
    return LanguageModel(folder, group=4, device="cpu")


def optimizer_of(policy: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)


def with_rewards(rollouts: Rollouts) -> Rollouts:
    """The same, as if the first of each group of four had been right."""
    return Rollouts(
        rollouts.tokens, rollouts.log_probabilities, torch.tensor([1.0, 0, 0, 0] * (len(rollouts.tokens) // 4))
    )


def bits(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.view(torch.int16) for name, weight in values(policy.state_dict()).items()}


def test_a_policy_has_fp32_weights_of_bf16_values_each_under_one_name(game: LanguageModel) -> None:
    state = game.policy().state_dict()
    assert "model.embed_tokens.weight" in state
    assert "lm_head.weight" not in state
    for weight in state.values():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, weight.bfloat16().float())


def test_a_model_that_is_made_and_not_read_is_rounded_and_named_alike(folder: str, game: LanguageModel) -> None:
    class Made(LanguageModel):
        def load(self) -> torch.nn.Module:
            config = transformers.AutoConfig.from_pretrained(self.folder, local_files_only=True)
            torch.manual_seed(2)
            model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            return model

    made, read = Made(folder, 4, "cpu").policy().state_dict(), game.policy().state_dict()
    assert list(made) == list(read)
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in made.values())
    assert not all(torch.equal(weight, read[name]) for name, weight in made.items())


def test_a_policy_is_read_without_its_state_dict(game: LanguageModel) -> None:
    policy = game.policy()
    found = tensors_of(policy)
    assert found is not None
    assert list(found) == list(policy.state_dict())
    assert len(list(policy.parameters())) == len(found)


def test_a_policy_can_be_saved_and_loaded_again(game: LanguageModel) -> None:
    one: Any = game.policy()
    other: Any = game.policy()
    with torch.no_grad():
        for weight in one.parameters():
            weight.add_(1.0)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.lm_head.weight, one.model.embed_tokens.weight)


def test_rollouts_have_a_row_for_each_sample_and_shards_can_be_joined(game: LanguageModel) -> None:
    policy = game.policy()
    parts = [game.play(policy, 3, seed) for seed in range(6)]
    joined = Rollouts.join(parts)
    assert joined.tokens.shape == (6 * 3 * 4, game._width + ANSWER)
    assert joined.log_probabilities.shape == (6 * 3 * 4, ANSWER)
    assert joined.rewards.shape == (6 * 3 * 4,)
    asked = joined.tokens[:, :-ANSWER].view(-1, 4, game._width)
    assert (asked == asked[:, :1]).all()


def test_a_seed_decides_prompts_and_completions(game: LanguageModel) -> None:
    policy = game.policy()
    one, same, other = (game.play(policy, 4, seed) for seed in (1, 1, 2))
    assert torch.equal(one.tokens, same.tokens)
    assert torch.equal(one.log_probabilities, same.log_probabilities)
    assert not torch.equal(one.tokens, other.tokens)


def test_short_prompts_are_padded_on_the_left(game: LanguageModel) -> None:
    short, long = game._prompt(11, 11), game._prompt(23, 48)
    assert len(short) == len(long)
    assert short[:4] == [PAD] * 4
    assert short[4] != PAD
    assert PAD not in long


def test_log_probabilities_are_those_of_a_plain_forward_pass_without_padding(game: LanguageModel) -> None:
    policy = game.policy()
    asked = torch.tensor([game._prompt(11, 11), game._prompt(11, 23), game._prompt(23, 48)])
    completed, likely = game._complete(policy, asked, torch.Generator().manual_seed(3))
    tokens = torch.cat([asked.repeat_interleave(4, dim=0), completed], dim=1)
    again = game.log_probabilities(policy, tokens)
    for row, told, learned in zip(tokens, likely, again, strict=True):
        said = row[(row != PAD).nonzero()[0, 0] :][None]  # from where the prompt begins
        with torch.no_grad():
            expected = policy(said).logits.log_softmax(-1)[0, :-1].gather(1, said[0, 1:, None])[-ANSWER:, 0]
        counted = game.counted(row[None])[0]
        torch.testing.assert_close(told[counted], expected[counted], rtol=0, atol=1e-4)
        torch.testing.assert_close(learned[counted], expected[counted], rtol=0, atol=1e-4)


def test_nothing_follows_an_end_token(game: LanguageModel) -> None:
    policy = game.policy()
    rollouts = game.play(policy, 16, 5)
    completed, counted = rollouts.tokens[:, -ANSWER:], game.counted(rollouts.tokens)
    ended = [row.tolist().index(END) + 1 for row in completed if END in row]
    assert ended, "no completion of this seed ends: the test shows nothing"
    assert min(ended) < ANSWER
    for row, likely, counts in zip(completed, rollouts.log_probabilities, counted, strict=True):
        length = row.tolist().index(END) + 1 if END in row else ANSWER
        assert counts.tolist() == [True] * length + [False] * (ANSWER - length)
        assert (row[length:] == PAD).all()
        assert (likely[length:] == 0).all()


def test_tokens_after_an_end_token_do_not_change_what_is_learned(game: LanguageModel) -> None:
    played = with_rewards(game.play(game.policy(), 8, 5))
    tokens = played.tokens.clone()
    after = ~game.counted(tokens)
    tokens[:, -ANSWER:][after] = SYMBOLS.index("7")
    learned = []
    for rollouts in (played, Rollouts(tokens, played.log_probabilities, played.rewards)):
        policy = game.policy()
        game.learn(policy, optimizer_of(policy), rollouts)
        learned.append(policy.state_dict())
    assert after.any()
    for name, weight in learned[0].items():
        assert torch.equal(weight, learned[1][name])


def test_the_first_integer_decides_the_reward(game: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "SMALLEST", 23)
    monkeypatch.setattr(language, "LARGEST", 23)
    said = torch.tensor([[SYMBOLS.index(symbol) for symbol in text] + [END] for text in ("46", "47", "?4", "-4")])
    filled = torch.nn.functional.pad(said, (0, ANSWER - said.shape[1]), value=PAD)
    monkeypatch.setattr(game, "_complete", lambda *_: (filled, torch.zeros(4, ANSWER)))
    assert game.play(game.policy(), 1, 0).rewards.tolist() == [1, 0, 0, 0]
    assert [first_integer(text) for text in ("71.", "It is 71", "-5", "none")] == [71, 71, -5, None]


def test_a_step_makes_what_was_rewarded_likelier(game: LanguageModel) -> None:
    policy = game.policy()
    rollouts = with_rewards(game.play(policy, 4, 7))
    before = game.log_probabilities(policy, rollouts.tokens).detach()
    loss = game.learn(policy, optimizer_of(policy), rollouts)
    gained = (game.log_probabilities(policy, rollouts.tokens).detach() - before) * game.counted(rollouts.tokens)
    assert abs(loss) < 10
    assert gained[0::4].sum() > 0
    assert gained[0::4].sum() > gained[1::4].sum()


def test_samples_are_taken_in_pieces_with_the_same_result(game: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts, learned = with_rewards(game.play(game.policy(), 4, 7)), []
    for rows in (64, 3):
        monkeypatch.setattr(language, "ROWS", rows)
        policy = game.policy()
        loss = game.learn(policy, torch.optim.SGD(policy.parameters(), lr=1.0), rollouts)
        learned.append((loss, policy.state_dict()))
    assert learned[0][0] == pytest.approx(learned[1][0], abs=1e-5)
    for name, weight in learned[0][1].items():
        torch.testing.assert_close(weight, learned[1][1][name], rtol=0, atol=1e-5)


def test_equal_rewards_teach_nothing(game: LanguageModel) -> None:
    policy = game.policy()
    played, before = game.play(policy, 2, 7), bits(policy)
    same = Rollouts(played.tokens, played.log_probabilities, torch.ones_like(played.rewards))
    assert game.learn(policy, optimizer_of(policy), same) == 0
    assert all(torch.equal(weight, before[name]) for name, weight in bits(policy).items())


def test_a_worker_that_is_given_the_published_values_plays_as_the_trainer_would(game: LanguageModel) -> None:
    trainer, worker = game.policy(), game.policy()
    before = bits(trainer)
    game.learn(trainer, optimizer_of(trainer), with_rewards(game.play(worker, 4, 7)))
    published = values(trainer.state_dict())
    assert any(not torch.equal(weight, before[name]) for name, weight in bits(trainer).items())
    for policy in (trainer, worker):
        policy.load_state_dict({name: weight.float() for name, weight in published.items()})
    assert torch.equal(game.play(trainer, 4, 8).tokens, game.play(worker, 4, 8).tokens)


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(PulseError, match=r"has no checkpoint"):
        LanguageModel(str(tmp_path), 4, "cpu")


def test_a_tokenizer_without_chat_template_is_refused(folder: str, tmp_path: Path) -> None:
    for path in Path(folder).iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(PulseError, match="no chat template"):
        LanguageModel(str(tmp_path), 4, "cpu")


def test_without_transformers_the_error_names_the_extra(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PulseError, match=r"transformers is not installed: pip install .*\[llm\]"):
        LanguageModel(folder, 4, "cpu")
