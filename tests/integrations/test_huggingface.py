"""What holds without the packages of Hugging Face; tests/integrations/hf runs with them."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pulsesync.errors import PulseError
from pulsesync.integrations import huggingface
from pulsesync.integrations.peft import merged_weights
from tests.examples import python_path


def test_importing_the_adapters_needs_no_package_of_hugging_face() -> None:
    program = (
        "import sys, pulsesync.integrations.huggingface, pulsesync.integrations.peft;"
        "print(*{'torch', 'transformers', 'peft'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": python_path()}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def ask_for_the_callback() -> Any:
    from pulsesync.integrations.huggingface import PulseCallback

    return PulseCallback


@pytest.mark.parametrize(
    ("missing", "use"), [("transformers", ask_for_the_callback), ("peft", lambda: merged_weights(object()))]
)
def test_a_missing_package_is_named_with_the_extra_that_installs_it(
    missing: str, use: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, missing, None)
    huggingface._pulse_callback.cache_clear()
    with pytest.raises(PulseError, match=rf"{missing} is not installed: pip install 'pulsesync\[hf\]'"):
        use()


def test_the_module_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'PulseCallbacks'"):
        huggingface.PulseCallbacks  # noqa: B018
