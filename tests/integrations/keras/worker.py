"""A worker in a process of its own, on the backend that KERAS_BACKEND names: python worker.py RUN

Prints the name and the bits, in hexadecimal digits, of every tensor.
"""

import sys

import keras

from pulsesync.integrations.keras import KerasSubscriber, KerasWeights
from pulsesync.testing.frameworks import read

model = keras.Sequential(
    [
        keras.Input((8,)),
        keras.layers.Dense(16, activation="relu", name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.1, name="dropout"),
        keras.layers.Dense(4, name="out"),
    ],
    name="policy",
)
KerasSubscriber(sys.argv[1]).sync(model)
for name, bits in read(KerasWeights(model)).items():
    print(name, bits.tobytes().hex())
