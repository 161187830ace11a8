"""What the policy learns: to add two numbers of three digits, "271+828=" -> "1099". The answer is easy to check."""

import torch
from torch import Tensor

SYMBOLS = "0123456789+="
PROMPT = 8  # tokens
ANSWER = 4  # tokens
LENGTH = PROMPT + ANSWER


def prompts(count: int, generator: torch.Generator) -> Tensor:
    """Draw sums to solve: (count, PROMPT) tokens."""
    a, b = (torch.randint(0, 1000, (count,), generator=generator) for _ in range(2))
    plus, equals = (torch.full((count, 1), SYMBOLS.index(symbol)) for symbol in "+=")
    return torch.cat([_digits(a, 3), plus, _digits(b, 3), equals], dim=1)


def answers(asked: Tensor) -> Tensor:
    """The right completions: (count, ANSWER) tokens."""
    return _digits(_number(asked[:, :3]) + _number(asked[:, 4:7]), ANSWER)


def rewards(asked: Tensor, completions: Tensor) -> Tensor:
    """1 for each correct completion, else 0."""
    return (completions == answers(asked)).all(dim=1).float()


def text(tokens: Tensor) -> str:
    return "".join(SYMBOLS[int(token)] for token in tokens)


def _digits(numbers: Tensor, count: int) -> Tensor:
    places = torch.tensor([10**i for i in reversed(range(count))])
    return numbers[:, None] // places % 10


def _number(digits: Tensor) -> Tensor:
    return digits @ torch.tensor([10**i for i in reversed(range(digits.shape[1]))])
