"""Published figures of the papers and their data, in per cent unless stated otherwise, for comparison.

PULSE: arXiv 2602.03839; the figures are means over steps and seeds of its authors' raw data (GRPO on MATH, 400 steps,
AdamW (0.9, 0.999), 20 steps of warm-up, 512 rollouts a step). The runs of its first version had weights in BF16,
without FP32 masters. SparseRL-Sync: Qwen3-30B-A3B.
"""

from pulsesync_lab.study.experiments.arm import Row

PULSE = "PULSE, raw data"
PULSE_PROFILE = "PULSE, raw data by step"
SPARSERL = "SparseRL-Sync, Qwen3-30B-A3B"

_COLUMNS = ("k1", "k2", "k4", "k8", "k16", "k32", "min")


def _row(name: str, *figures: float, beside: str = "") -> Row:
    return Row(name, PULSE, dict(zip(_COLUMNS, figures, strict=False)), beside)


def sparsity(name: str, beside: str = "") -> Row:
    """Sparsity over k steps of one published run, to be shown under an arm."""
    return Row(name, PULSE, SPARSITY[name].figures, beside)


SPARSITY = {
    row.name: row
    for row in (
        _row("Qwen2.5 0.5B, 3e-6", 99.257, 99.143, 98.998, 98.814, 98.588, 98.346, 98.12),
        _row("Qwen2.5 1.5B, 3e-6", 99.426, 99.342, 99.235, 99.101, 98.939, 98.768, 98.48),
        _row("Qwen2.5 7B, 3e-6", 99.144, 99.008, 98.828, 98.603, 98.336, 98.038, 98.52),
        _row("Llama 3.2 3B, 3e-6", 99.126, 98.984, 98.807, 98.587, 98.326, 98.049, 98.20),
        _row("Gemma 3 1B, 3e-6", 99.149, 99.006, 98.826, 98.598, 98.316, 97.983, 98.60),
        _row("Gemma 3 4B, 3e-6", 98.927, 98.743, 98.511, 98.220, 97.870, 97.480, 98.31),
        _row("Qwen2.5 1.5B, 5e-7", 99.803, 99.791, 99.775, 99.755, 99.728, 99.696, 99.68),
        _row("Qwen2.5 1.5B, 1e-6", 99.734, 99.708, 99.676, 99.635, 99.583, 99.525, 99.39),
        _row("Qwen2.5 1.5B, 5e-6", 99.058, 98.907, 98.712, 98.469, 98.182, 97.863, 98.14),
        _row("Qwen2.5 1.5B, 8 updates a batch", 98.970, 98.893, 98.764, 98.562, 98.282, 97.949),
        _row("Qwen2.5 1.5B, 16 updates a batch", 98.761, 98.686, 98.558, 98.355, 98.067, 97.712),
        _row("Qwen2.5 1.5B, 32 updates a batch", 98.650, 98.577, 98.456, 98.262, 97.983, 97.619),
        _row("Qwen2.5 1.5B, SFT 2e-5", 95.998, 95.340, 94.511, 93.478, 92.283, 91.059, 92.42),
        Row("Qwen2.5 1.5B, SFT 3e-6", PULSE, {"k1": 98.212, "min": 97.69}),
    )
}

# By step, Qwen2.5 1.5B at 3e-6: 99.872 / 99.649 (1–4) / 99.238 (5–9) / 98.677 (10–19) / 98.886 (20–29) /
# 99.344 (30–49) / 99.44–99.49 after. Over all models: 99.77–99.87, then 98.4–98.9 at steps 10–30.
PROFILE = Row(
    "Qwen2.5 1.5B, 3e-6",
    PULSE_PROFILE,
    {"first": 99.872, "trough": 98.677, "trough step": 15, "plateau": "99.44–99.49"},
)
PROFILE_SFT = Row("Qwen2.5 1.5B, SFT 2e-5", PULSE_PROFILE, {"trough": 92.86})

DTYPES = Row(
    "GRPO, no rate given",
    SPARSERL,
    {"BF16": 100 - 0.6141, "F16": 100 - 2.43, "F8_E4M3": 100 - 0.0655, "F32": 100 - 99.46},
)
ALGORITHMS = tuple(
    Row(name, SPARSERL, {"k1": 100 - changed})
    for name, changed in (
        ("GRPO", 0.6141),
        ("DAPO", 0.5997),
        ("GSPO", 0.6042),
        ("asynchronous", 0.5994),
        ("agentic", 0.6970),
    )
)
OVERLAP = Row("steps 1 to 10", SPARSERL, {"overlap early": "45–52", "overlap late": "72–77"})
EXPERTS = Row(
    "128 experts, 10 steps; changed: in every one of them",
    SPARSERL,
    {"experts changed": 97.98, "experts never": 0.46, "inactive": "5–6", "k1": 100 - 0.6141},
)
GRADIENTS = Row("dense gradients", "PULSE", {"gradients": 99.0})
SFT_TO_GRPO = 3.1  # times the changes, at the same learning rate: 1.79 % against 0.57 %
