"""Trainers that exchange only what the next forward pass would see: PULSELoCo, and what it is compared with.

`diloco` has what a training script uses; `gate`, `payload` and `outer_step` the functions underneath, which know no
network; `group` and `store` the exchanges between trainers. See docs/loco.md. Needs the extra torch.
"""

from pulsesync.loco.diloco import DDP, DiLoCo, PublishedPulseLoCo, PulseLoCo
from pulsesync.loco.exchange import Exchange
from pulsesync.loco.group import GroupExchange
from pulsesync.loco.outer_step import SGD, Nesterov
from pulsesync.loco.rounds import RoundReport
from pulsesync.loco.store import StoreExchange

__all__ = [
    "DDP",
    "SGD",
    "DiLoCo",
    "Exchange",
    "GroupExchange",
    "Nesterov",
    "PublishedPulseLoCo",
    "PulseLoCo",
    "RoundReport",
    "StoreExchange",
]
