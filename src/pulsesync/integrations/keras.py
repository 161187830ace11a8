"""Keras 3 on TensorFlow, JAX or torch: publish the weights of a model, follow them in another, or publish during `fit`.

    KerasPublisher("s3://bucket/run", cast="BF16").publish(model, step=step)             # trainer
    model.fit(..., callbacks=[KerasCallback("s3://bucket/run", every=10)])               # or so

    subscriber = KerasSubscriber("s3://bucket/run")                                      # worker, on any backend
    subscriber.sync(model)

The name of a tensor is the path of its variable, such as "policy/dense/kernel"; two variables with the same path are
refused. `model.weights` is published: trained weights, and statistics such as those of BatchNormalization. Variables of
the optimizer, of metrics and of seed generators are left out, unless `variables=` returns them.

Keras is imported when this module is first used: `KerasCallback` is made then, from `KerasPublishing`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any, Literal

import numpy as np

from pulsesync.errors import PulseError, StateError
from pulsesync.integrations.frameworks import FrameworkSubscriber, published_tensors
from pulsesync.integrations.jax import all_on_gpus, array_bits, array_like, lent
from pulsesync.publish.pending import PublishReport
from pulsesync.publish.publisher import Publisher
from pulsesync.run.reporting import SyncReport
from pulsesync.store import Location

__all__ = ["KerasCallback", "KerasPublisher", "KerasSubscriber", "KerasWeights"]  # noqa: F822 - by __getattr__, below

Variables = Callable[[Any], Iterable[Any]]
BACKENDS = ("tensorflow", "jax", "torch")


class KerasWeights:
    """The weights of a Keras model as a `FrameworkWeights`.

    Args:
        model: A model that is built.
        variables: Returns the variables of the model to use; None: `model.weights`.

    Raises:
        StateError: the model is not built, two variables have the same path, or the backend is not supported.
    """

    def __init__(self, model: Any, variables: Variables | None = None) -> None:
        self.backend: str = _keras().backend.backend()
        if self.backend not in BACKENDS:
            raise StateError(f"Keras must run on one of {', '.join(BACKENDS)}; it runs on {self.backend}")
        if not model.built:
            raise StateError(f"model {model.name!r} has no weights yet; build it, or call it once, first")
        self.immutable = self.backend != "torch"  # the other backends replace values, or return copies
        self._variables: dict[str, Any] = {}
        for variable in variables(model) if variables else model.weights:
            if variable.path in self._variables:
                raise StateError(
                    f"two variables have the path {variable.path!r}; give their layers different names",
                    tensor=variable.path,
                )
            self._variables[variable.path] = variable
        values = [variable.value for variable in self._variables.values()]
        self._by_torch = self.backend == "jax" and all_on_gpus(values)

    def names(self) -> Iterable[str]:
        return self._variables

    def bits(self, name: str) -> Any:
        value = self._variables[name].value
        if self.backend == "jax":
            return array_bits(name, value, self._by_torch)
        if self.backend == "torch":
            return value.detach()
        return np.asarray(value.numpy())

    def write(self, name: str, bits: Any) -> None:
        variable = self._variables[name]
        variable.assign(array_like(name, variable.value, bits) if self.backend == "jax" else bits)

    def lent(self) -> Any:
        """Return a context at whose end nothing reads the weights that `bits` has returned inside."""
        if self.backend != "jax":
            return nullcontext()
        return lent([variable.value for variable in self._variables.values()])


class KerasPublisher(Publisher):
    """A `Publisher` whose `publish` takes a Keras model.

    Args:
        location: A path or URL of the run, or a store.
        variables: Returns the variables of a model to publish; None: `model.weights`.
        options: As for `Publisher`: `cast`, `signing_key`, `publish_every`, `link`, ….
    """

    def __init__(self, location: Location, *, variables: Variables | None = None, **options: Any) -> None:
        super().__init__(location, **options)
        self._variables = variables

    def publish(self, model: Any, **options: Any) -> Any:  # type: ignore[override]
        """Publish the weights of a model as the next version; the first one in full.

        Args:
            model: A model that is built.
            options: As for `Publisher.publish`: `step`, `wait`, `now`, `coalesce`.

        Raises:
            StateError: as `KerasWeights`; and as `Publisher.publish`.
        """
        weights = KerasWeights(model, self._variables)
        with weights.lent():
            return super().publish(published_tensors(weights), **options)


class KerasSubscriber(FrameworkSubscriber):
    """Syncs the weights of Keras models to the versions of a run, in the models' own variables.

    Args:
        location: A path or URL of the run, or a store.
        variables: Returns the variables of a model to write, as those that were published; None: `model.weights`.
        options: As for `Subscriber`: `trust`, `cache`, `follow`, `undo`, `verify_every`, ….
    """

    def __init__(self, location: Location, *, variables: Variables | None = None, **options: Any) -> None:
        super().__init__(location, **options)
        self._variables = variables

    def sync(self, model: Any, version: int | None = None, **options: Any) -> SyncReport:  # type: ignore[override]
        """Sync a model to the newest version, or to a given one. Args and raises: as `FrameworkSubscriber.sync`."""
        weights = KerasWeights(model, self._variables)
        with weights.lent():
            return super().sync(weights, version, **options)

    def watch(self, model: Any, **options: Any) -> Iterator[SyncReport]:  # type: ignore[override]
        """Sync a model to each version as it is published, and yield the report of each. Raises: as `sync`."""
        return super().watch(KerasWeights(model, self._variables), **options)

    def roll_back(self, model: Any) -> int | None:
        """Undo the last sync that wrote, from memory. Return the version, None if there is no sync to undo."""
        return super().roll_back(KerasWeights(model, self._variables))

    def verify(self, model: Any) -> str:
        """Compare a model with the version of the last sync, bit for bit; return the digest. Raises: as there."""
        return super().verify(KerasWeights(model, self._variables))


class KerasPublishing:
    """Publishes the weights of a model during `fit`: when it begins, at every epoch or some batches, and when it ends.

    The step of a version is the optimizer's number of iterations. Versions are encoded and sent in the background; if
    one fails, a later call raises the error (see `Publisher.publish`), and a later version contains its changes. When
    `fit` ends, the last weights are published and everything is sent: list this after callbacks that change weights at
    the end, as EarlyStopping with restore_best_weights does. Another `fit` resumes the run.

    Args:
        location: A path or URL of the run, or a store.
        every: "epoch", or a number of batches.
        options: As for `KerasPublisher`: `variables`, `cast`, `signing_key`, `link`, ….

    Raises:
        ValueError: every is neither.
    """

    model: Any  # set by Keras

    def __init__(self, location: Location, *, every: int | Literal["epoch"] = "epoch", **options: Any) -> None:
        super().__init__()
        if every != "epoch" and not (isinstance(every, int) and every > 0):
            raise ValueError(f"every must be 'epoch' or a number of batches above 0; got {every!r}")
        self.location, self.every, self.options = location, every, options
        self.publisher: KerasPublisher | None = None  # during fit
        self.report: PublishReport | None = None  # of the last version of a fit that has ended
        self._last = 0  # the iteration that was published last

    def on_train_begin(self, logs: Any = None) -> None:
        """Publish the weights that training starts with. Raises: as `KerasPublisher.publish`."""
        self.publisher = self.publisher or KerasPublisher(self.location, **self.options)
        self._publish()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Publish after every `every` batches. Raises: as `KerasPublisher.publish`."""
        if self.every != "epoch":
            if hasattr(self.model, "jax_state_sync"):
                self.model.jax_state_sync()  # on JAX, `fit` keeps the weights in its own state during an epoch
            if self._iteration() - self._last >= self.every:
                self._publish()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Publish after an epoch, if every="epoch". Raises: as `KerasPublisher.publish`."""
        if self.every == "epoch":
            self._publish()

    def on_train_end(self, logs: Any = None) -> None:
        """Publish the last weights, send everything and close. Raises: as `KerasPublisher.publish` and `close`."""
        publisher, self.publisher = self.publisher, None
        if publisher is not None:
            with publisher:
                self.report = publisher.publish(self.model, step=self._iteration(), now=True)

    def _publish(self) -> None:
        assert self.publisher is not None
        self._last = self._iteration()
        self.publisher.publish(self.model, step=self._last, wait=False)

    def _iteration(self) -> int:
        return int(self.model.optimizer.iterations)


def _keras() -> Any:
    """Return the module keras. Raises: PulseError, if it is not installed."""
    try:
        import keras
    except ModuleNotFoundError as e:
        raise PulseError(
            f"{e.name} is not installed: pip install 'pulsesync[keras]' and a backend (tensorflow, jax or torch)"
        ) from e
    return keras


@cache
def _keras_callback() -> type:
    """Make `KerasCallback`. Raises: PulseError, if Keras is not installed."""
    bases = (KerasPublishing, _keras().callbacks.Callback)
    return type("KerasCallback", bases, {"__doc__": KerasPublishing.__doc__, "__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "KerasCallback":
        return _keras_callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
