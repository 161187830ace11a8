"""A Trainer with a PulseCallback: every version is the trainer's weights, and the run is a checkpoint that loads."""

import copy
import json
import logging
import pickle
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

REASON = "needs the packages of Hugging Face: make test-trl runs it"
transformers = pytest.importorskip("transformers", reason=REASON)
peft = pytest.importorskip("peft", reason=REASON)

import torch  # noqa: E402 - after what skips the module

from pulsesync import Subscriber  # noqa: E402
from pulsesync.errors import StateError, StoreError  # noqa: E402
from pulsesync.integrations.folder import HuggingFaceFolder  # noqa: E402
from pulsesync.integrations.huggingface import PulseCallback  # noqa: E402
from pulsesync.integrations.peft import adapter_weights, merged_weights  # noqa: E402
from pulsesync.integrations.pretrained import checkpoint_files, checkpoint_weights  # noqa: E402
from pulsesync.run.reader import RunReader  # noqa: E402
from pulsesync.store import LocalStore, MemoryStore, Store  # noqa: E402
from tests.integrations.hf import models  # noqa: E402

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Steps(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Keeps the weights after every step, in a dtype, as a checkpoint would have them."""

    def __init__(self, dtype: Any = None, read: Any = checkpoint_weights) -> None:
        self.dtype, self.read = dtype, read
        self.kept: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.on_step_end(args, state, control, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.kept[state.global_step] = {
            name: (t.to(self.dtype) if self.dtype and t.dtype == torch.float32 else t).clone()
            for name, t in self.read(model).items()
        }


def trainer(folder: Path, model: Any, *callbacks: Any, **options: Any) -> Any:
    arguments = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "report_to": [],
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **options,
    }
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**arguments),
        train_dataset=models.rows(),
        eval_dataset=models.rows(4),
        processing_class=models.tokenizer(),
        data_collator=transformers.default_data_collator,
        callbacks=list(callbacks),
    )


def at_version(store: str | Store, version: int, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a worker has after a sync to a version."""
    weights = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    Subscriber(store).sync(weights, version=version)
    return weights


def check_every_step(store: str | Store, callback: Any, steps: Steps) -> None:
    assert callback.versions.keys() == steps.kept.keys()
    assert list(callback.versions.values()) == list(range(len(steps.kept)))
    for step, wanted in steps.kept.items():
        assert models.differing(at_version(store, callback.versions[step], wanted), wanted) == []
    changed = models.differing(steps.kept[min(steps.kept)], steps.kept[max(steps.kept)])
    assert changed  # else all of this would say nothing


def test_every_version_is_the_trainers_weights_after_that_step(tmp_path: Path) -> None:
    callback, steps = PulseCallback(str(tmp_path / "run"), every_step=True), Steps(torch.bfloat16)
    trainer(tmp_path, models.qwen2(), callback, steps, bf16=True).train()
    check_every_step(str(tmp_path / "run"), callback, steps)
    assert callback.publisher is None


def test_a_step_of_accumulated_gradients_is_one_version(tmp_path: Path) -> None:
    callback, steps = PulseCallback(str(tmp_path / "run"), every_step=True, cast="BF16"), Steps(torch.bfloat16)
    trainer(tmp_path, models.llama(), callback, steps, gradient_accumulation_steps=2, max_steps=3).train()
    assert sorted(steps.kept) == [0, 1, 2, 3]
    check_every_step(str(tmp_path / "run"), callback, steps)


def test_by_default_steps_may_share_a_version_and_each_has_one_that_contains_it(tmp_path: Path) -> None:
    store = MemoryStore()
    callback, steps = PulseCallback(store, cast="BF16"), Steps(torch.bfloat16)
    trainer(tmp_path, models.llama(), callback, steps, max_steps=8).train()
    records = RunReader(store, None)
    assert sorted(callback.versions) == list(range(9))
    for step, version in callback.versions.items():
        record = records.version(version)
        assert record is not None
        assert record.step >= step
        assert models.differing(at_version(store, version, steps.kept[0]), steps.kept[record.step]) == []
    newest = records.newest()
    assert newest is not None
    assert newest.step == 8


def test_a_followed_run_is_what_save_pretrained_writes(tmp_path: Path) -> None:
    model = models.qwen2()
    made = trainer(tmp_path, model, PulseCallback(str(tmp_path / "run")), bf16=True)
    made.train()
    saved = copy.deepcopy(model).to(torch.bfloat16)
    saved.save_pretrained(tmp_path / "saved")
    made.processing_class.save_pretrained(tmp_path / "saved")

    with HuggingFaceFolder(str(tmp_path / "run"), tmp_path / "folder") as folder:
        flip = folder.update()
    assert flip is not None
    assert flip.missing == flip.left_out == ()
    current = (tmp_path / "folder" / "current").resolve()
    assert models.differing(models.saved_in(current), models.saved_in(tmp_path / "saved")) == []
    for path in (tmp_path / "saved").iterdir():
        if path.suffix != ".safetensors":
            assert (current / path.name).read_bytes().strip() == path.read_bytes().strip(), path.name

    loaded = transformers.AutoModelForCausalLM.from_pretrained(current)
    assert loaded.dtype == torch.bfloat16
    assert models.differing(loaded.state_dict(), saved.state_dict()) == []
    words = transformers.AutoTokenizer.from_pretrained(current)
    assert words("a b z") == made.processing_class("a b z")
    assert words.chat_template == made.processing_class.chat_template


@pytest.mark.parametrize("make", [models.llama, models.qwen2, models.gpt2, models.mixtral])
def test_names_ties_and_bits_are_those_of_save_pretrained(make: Any, tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path / "saved")
    wanted = models.saved_in(tmp_path / "saved")
    for wrapped in (model, torch.compile(model, backend="eager"), torch.nn.DataParallel(model)):
        found = checkpoint_weights(wrapped)
        aliases = found.keys() - wanted.keys()
        assert models.differing({name: found[name] for name in found.keys() - aliases}, wanted) == []
        assert all(any(found[a].data_ptr() == found[b].data_ptr() for b in wanted) for a in aliases)
        assert sorted(aliases) == (["lm_head.weight"] if model.config.tie_word_embeddings else [])
        written = json.loads((tmp_path / "saved" / "config.json").read_text())
        assert json.loads(checkpoint_files(wrapped)["config.json"]) == written


def test_layers_that_were_compiled_one_by_one_keep_their_names() -> None:
    model = models.llama()
    wanted = checkpoint_weights(model)
    for n, layer in enumerate(model.model.layers):
        model.model.layers[n] = torch.compile(layer, backend="eager")
    assert any("_orig_mod" in name for name in model.state_dict())
    assert models.differing(checkpoint_weights(model), wanted) == []


@pytest.mark.parametrize(
    ("dtype", "precision", "options", "published", "warned"),
    [
        (torch.float32, {"bf16": True}, {}, "BF16", False),
        (torch.bfloat16, {}, {}, "BF16", False),
        (torch.bfloat16, {"bf16": True}, {}, "BF16", False),
        (torch.float32, {}, {}, "F32", True),
        (torch.float32, {}, {"cast": {}}, "F32", False),
        (torch.float32, {}, {"cast": "F16"}, "F16", False),
        (torch.float32, {"bf16": True}, {"cast": {}}, "F32", False),
    ],
)
def test_the_dtype_that_is_published(
    dtype: torch.dtype,
    precision: dict[str, Any],
    options: dict[str, Any],
    published: str,
    warned: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    with caplog.at_level(logging.INFO, "pulsesync"):
        trainer(tmp_path, models.llama().to(dtype), PulseCallback(store, **options), max_steps=1, **precision).train()
    records = RunReader(store, None)
    newest = records.newest()
    assert newest is not None
    assert {spec.dtype for spec in records.layout(newest.layout).tensors} == {published}
    named = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[published]
    with HuggingFaceFolder(store, tmp_path / "folder") as folder:
        folder.update()
    assert json.loads((tmp_path / "folder" / "current" / "config.json").read_text())["dtype"] == named
    assert ("twice the bytes of BF16" in caplog.text) == warned
    assert "Published up to version 1 (step 1)" in caplog.text


class Arguments:
    """Of a Trainer that trains in FP16, which no CPU can."""

    bf16, fp16, load_best_model_at_end = False, True, False


class TrainingState:
    global_step, is_world_process_zero = 0, True


def test_masters_of_fp16_are_published_as_fp16() -> None:
    store = MemoryStore()
    callback, model = PulseCallback(store), models.llama()
    callback.on_train_begin(Arguments(), TrainingState(), None, model=model, processing_class=None)
    callback.close()
    wanted = {name: tensor.half() for name, tensor in checkpoint_weights(model).items()}
    assert models.differing(at_version(store, 0, wanted), wanted) == []


def test_another_rank_than_the_first_publishes_nothing(tmp_path: Path) -> None:
    callback, state = PulseCallback(str(tmp_path / "run")), TrainingState()
    state.is_world_process_zero = False
    callback.on_train_begin(Arguments(), state, None, model=models.llama())
    callback.on_step_end(Arguments(), state, None, model=models.llama())
    callback.on_train_end(Arguments(), state, None, model=models.llama())
    callback.flush()
    assert callback.publisher is None
    assert not (tmp_path / "run").exists()


def test_parameters_that_deepspeed_has_partitioned_are_refused_by_name() -> None:
    model = models.llama()
    model.lm_head.weight.ds_id = 7  # as ZeRO-3 marks what it has partitioned
    with pytest.raises(StateError, match=r"DeepSpeed ZeRO-3 has partitioned parameter 'lm_head.weight'.*FSDP2") as e:
        PulseCallback(MemoryStore()).on_train_begin(Arguments(), TrainingState(), None, model=model)
    assert e.value.tensor == "lm_head.weight"


def test_offloaded_parameters_are_refused_by_name() -> None:
    with torch.device("meta"):
        model = models.llama()
    with pytest.raises(StateError, match="is offloaded"):
        checkpoint_weights(model)


def test_a_second_training_resumes_the_run(tmp_path: Path) -> None:
    callback, steps = PulseCallback(str(tmp_path / "run"), every_step=True, cast="BF16"), Steps(torch.bfloat16)
    made = trainer(tmp_path, models.llama(), callback, steps, max_steps=2)
    made.train()
    assert callback.versions == {0: 0, 1: 1, 2: 2}
    made.train()
    assert callback.versions == {0: 3, 1: 4, 2: 5}
    for step, wanted in steps.kept.items():
        assert models.differing(at_version(str(tmp_path / "run"), callback.versions[step], wanted), wanted) == []


@pytest.mark.parametrize("restores", [False, True])
def test_a_training_that_is_resumed_from_a_checkpoint_continues_the_run(restores: bool, tmp_path: Path) -> None:
    store = str(tmp_path / "run")
    options = {"save_strategy": "steps", "save_steps": 2, "restore_callback_states_from_checkpoint": restores}
    trainer(tmp_path, models.llama(), PulseCallback(store, every_step=True, cast="BF16"), **options).train()
    callback, steps = PulseCallback(store, every_step=True, cast="BF16"), Steps(torch.bfloat16)
    trainer(tmp_path, models.llama(5), callback, steps, **options).train(
        resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2")
    )
    assert callback.versions == {2: 5, 3: 6, 4: 7}
    for step, wanted in steps.kept.items():
        assert models.differing(at_version(store, callback.versions[step], wanted), wanted) == []


def test_the_best_weights_that_are_loaded_at_the_end_are_the_last_version(tmp_path: Path) -> None:
    model, store = models.llama(), str(tmp_path / "run")
    trainer(
        tmp_path,
        model,
        PulseCallback(store, cast={}),
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the first checkpoint is the best, then
    ).train()
    newest = RunReader(LocalStore(tmp_path / "run"), None).newest()
    assert newest is not None
    wanted = checkpoint_weights(model)
    assert models.differing(at_version(store, newest.version, wanted), wanted) == []


def test_the_last_step_is_published_whatever_publish_every_says(tmp_path: Path) -> None:
    store, model = str(tmp_path / "run"), models.llama()
    callback = PulseCallback(store, cast={}, publish_every=3)
    trainer(tmp_path, model, callback, max_steps=5).train()
    assert callback.versions.keys() == {0, 1, 2, 3, 4, 5}
    assert callback.versions[1] == callback.versions[2] == callback.versions[3]
    assert callback.versions[4] == callback.versions[5] > callback.versions[3]
    wanted = checkpoint_weights(model)
    assert models.differing(at_version(store, callback.versions[5], wanted), wanted) == []


class RefusingStore(MemoryStore):
    """Takes nothing while it refuses, as a bucket does whose credentials were withdrawn."""

    refuses = False

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._check(key)
        super().put(key, data)

    def create(self, key: str, data: bytes) -> None:
        self._check(key)
        super().create(key, data)

    def _check(self, key: str) -> None:
        if self.refuses:
            raise StoreError("access denied", key=key, retryable=False)


def test_a_publish_that_fails_is_raised_by_the_next_step_and_the_run_stays_whole(tmp_path: Path) -> None:
    store = RefusingStore()
    callback, steps, model = PulseCallback(store, cast="BF16"), Steps(torch.bfloat16), models.llama()

    class Breaks(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:  # the step that follows fails to be sent
                callback.flush()
                store.refuses = True
            if state.global_step == 4:
                wait([callback._futures[4]], 60)

    made, breaks = trainer(tmp_path, model, callback, steps, max_steps=8), Breaks()
    made.add_callback(breaks)
    with pytest.raises(StoreError, match="access denied"):
        made.train()
    assert max(steps.kept) == 4
    newest = RunReader(store, None).newest()
    assert newest is not None
    assert newest.step == 3
    assert models.differing(at_version(store, newest.version, steps.kept[0]), steps.kept[3]) == []

    store.refuses = False
    made.remove_callback(breaks)
    made.train()
    newest = RunReader(store, None).newest()
    assert newest is not None
    assert newest.step == 8
    assert models.differing(at_version(store, newest.version, steps.kept[0]), steps.kept[8]) == []


# For those who wait for a version


def test_the_version_of_a_step_can_be_waited_for(tmp_path: Path) -> None:
    callback = PulseCallback(MemoryStore(), cast="BF16")
    found = {}

    class Waits(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            found[state.global_step] = callback.version_of(state.global_step, timeout_s=60)

    trainer(tmp_path, models.llama(), callback, Waits()).train()
    assert found == {1: 1, 2: 2, 3: 3, 4: 4}
    assert callback.version_of(4) == 4
    with pytest.raises(StateError, match="step 9 is in no version"):
        callback.version_of(9)


def test_a_callback_can_be_copied_and_pickled_while_it_publishes(tmp_path: Path) -> None:
    callback = PulseCallback(str(tmp_path / "run"), cast="BF16", every_step=True)
    callback.on_train_begin(Arguments(), TrainingState(), None, model=models.llama())
    for copied in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert type(copied) is PulseCallback
        assert (copied.location, copied.options, copied.every_step) == (str(tmp_path / "run"), {"cast": "BF16"}, True)
        assert copied.publisher is None
    callback.close()


def test_wrong_arguments_are_refused_before_training() -> None:
    with pytest.raises(TypeError, match="Publisher has no option 'casts'"):
        PulseCallback("runs/one", casts="BF16")
    with pytest.raises(ValueError, match="adapters must be one of 'merged', 'only'; got 'both'"):
        PulseCallback("runs/one", adapters="both")
    with pytest.raises(ValueError, match="leave publish_every out"):
        PulseCallback("runs/one", every_step=True, publish_every=4)
    assert issubclass(PulseCallback, transformers.TrainerCallback)


# PEFT


def lora_model(**options: Any) -> Any:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], **options)
    return peft.get_peft_model(models.qwen2(), config)


def test_a_peft_model_is_published_merged(tmp_path: Path) -> None:
    callback, steps = PulseCallback(str(tmp_path / "run"), every_step=True), Steps(torch.bfloat16, merged_weights)
    model = lora_model(modules_to_save=["norm"])
    base = models.all_bits(
        dict(model.named_buffers()) | {n: p for n, p in model.named_parameters() if not p.requires_grad}
    )
    trainer(tmp_path, model, callback, steps, bf16=True).train()
    check_every_step(str(tmp_path / "run"), callback, steps)
    now = dict(model.named_buffers()) | {n: p for n, p in model.named_parameters() if not p.requires_grad}
    assert models.differing(models.all_bits(now), base) == []

    with HuggingFaceFolder(str(tmp_path / "run"), tmp_path / "folder") as folder:
        folder.update()
    loaded = transformers.AutoModelForCausalLM.from_pretrained((tmp_path / "folder" / "current").resolve())
    reference = copy.deepcopy(model).merge_and_unload().to(torch.bfloat16)
    assert models.differing(loaded.state_dict(), reference.state_dict()) == []


def test_an_adapter_is_published_alone_and_loads(tmp_path: Path) -> None:
    callback = PulseCallback(str(tmp_path / "run"), every_step=True, adapters="only", cast={})
    steps = Steps(None, lambda model: adapter_weights(model)[0])
    model = lora_model()
    trainer(tmp_path, model, callback, steps).train()
    check_every_step(str(tmp_path / "run"), callback, steps)
    with HuggingFaceFolder(str(tmp_path / "run"), tmp_path / "folder") as folder:
        folder.update()
    loaded = peft.PeftModel.from_pretrained(models.qwen2(), (tmp_path / "folder" / "current").resolve())
    assert models.differing(peft.get_peft_model_state_dict(loaded), peft.get_peft_model_state_dict(model)) == []


def test_a_model_without_adapters_is_not_published_as_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="expected a PeftModel, got LlamaForCausalLM"):
        trainer(tmp_path, models.llama(), PulseCallback(str(tmp_path / "run"), adapters="only")).train()
