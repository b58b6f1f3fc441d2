"""TensorFlow's ParameterServerStrategy, in an environment of its own: rows and the whole click model on one server.

As its guide has it: a coordinator (the last rank) schedules functions on workers, which run on variables of the server.
Variables and kernels are used as they are, without Keras, whose optimizers do more around the same kernels. Rows are
looked up as they come, or made distinct by the worker first, which pays where ids repeat.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
import tensorflow as tf
from ps_workload import (
    BATCHES,
    DENSE,
    DIM,
    FIELDS,
    LAYERS,
    RATE,
    ROWS,
    SAMPLES,
    addresses,
    clicks_of,
    serves,
)
from serving import Operation, Seat, serve

Wanted = dict[str, Any]


class Table:
    """Rows on the server, and what their optimizer keeps."""

    def __init__(self, dim: int, rule: str) -> None:
        self._rule = rule
        self.rows = tf.Variable(tf.random.uniform([ROWS, dim], -0.01, 0.01))
        self._squares = tf.Variable(tf.fill([ROWS, dim], 0.1)) if rule == "adagrad" else None

    def push(self, ids: Any, gradients: Any) -> None:
        """Update the rows of distinct ids; of any ids, if the rule only adds."""
        if self._squares is None:
            tf.raw_ops.ResourceScatterSub(resource=self.rows.handle, indices=ids, updates=RATE * gradients)
            return
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=self.rows.handle,
            accum=self._squares.handle,
            lr=RATE,
            epsilon=1e-10,
            grad=gradients,
            indices=ids,
        )


def pull_and_push(table: Table, ids: Any, wanted: Wanted) -> None:
    """The rows of a batch, and a gradient for each."""
    if wanted["distinct"]:
        unique, places = tf.unique(ids)
        rows = tf.gather(tf.gather(table.rows, unique), places)
        table.push(unique, tf.math.unsorted_segment_sum(rows * 1e-3, places, tf.size(unique)))
        return
    gradients = tf.gather(table.rows, ids) * 1e-3
    if wanted["rule"] == "adagrad":  # as Keras does it
        ids, places = tf.unique(ids)
        gradients = tf.math.unsorted_segment_sum(gradients, places, tf.size(ids))
    table.push(ids, gradients)


class WideAndDeep:
    """The click model: a weight for each id and dense feature, and layers over embeddings."""

    def __init__(self, rule: str) -> None:
        self.wide, self.deep = Table(1, rule), Table(DIM, rule)
        widths = [FIELDS * DIM + DENSE, *LAYERS, 1]
        self.layers = [
            (tf.Variable(tf.random.normal([before, after], stddev=before**-0.5)), tf.Variable(tf.zeros([after])))
            for before, after in itertools.pairwise(widths)
        ]
        self.linear = tf.Variable(tf.zeros([DENSE, 1]))
        self._dense = [self.linear, *(variable for layer in self.layers for variable in layer)]
        self._squares = [tf.Variable(tf.fill(variable.shape, 0.1)) for variable in self._dense]

    def step(self, ids: Any, dense: Any, labels: Any) -> None:
        """Pull, compute, push."""
        unique, places = tf.unique(tf.reshape(ids, [-1]))
        wide, deep = tf.gather(self.wide.rows, unique), tf.gather(self.deep.rows, unique)
        values = [variable.read_value() for variable in self._dense]
        with tf.GradientTape() as tape:
            tape.watch([wide, deep, *values])
            linear, *layers = values
            logits = dense @ linear + tf.reduce_sum(tf.reshape(tf.gather(wide, places), [SAMPLES, FIELDS]), 1)[:, None]
            hidden = tf.concat([tf.reshape(tf.gather(deep, places), [SAMPLES, FIELDS * DIM]), dense], 1)
            for number in range(0, len(layers), 2):
                hidden = hidden @ layers[number] + layers[number + 1]
                hidden = tf.nn.relu(hidden) if number + 2 < len(layers) else hidden
            logits = (logits + hidden)[:, 0]
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
        of_wide, of_deep, *of_dense = tape.gradient(loss, [wide, deep, *values])
        for table, gradients in ((self.wide, of_wide), (self.deep, of_deep)):
            slices = tf.convert_to_tensor(gradients)
            table.push(unique, slices)
        for variable, squares, gradient in zip(self._dense, self._squares, of_dense, strict=True):
            tf.raw_ops.ResourceApplyAdagradV2(
                var=variable.handle, accum=squares.handle, lr=RATE, epsilon=1e-10, grad=gradient
            )


def run_on_workers(coordinator: Any, workers: int, dataset: Callable[[], Any], step: Callable[..., None]) -> Operation:
    """Each worker takes `BATCHES` batches of its dataset; a slow one takes fewer functions than a fast one."""
    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    several = BATCHES // 5

    @tf.function
    def some(batches: Any) -> None:
        for _ in tf.range(several):
            step(*next(batches))

    def run() -> None:
        for _ in range(workers * BATCHES // several):
            coordinator.schedule(some, args=(iterator,))
        coordinator.join()

    return Operation(run, lambda: None)


def coordinate(seat: Seat, cluster: Any) -> None:
    """The last rank."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    def make(wanted: Wanted) -> Operation:
        with strategy.scope():
            model = WideAndDeep(wanted["rule"]) if wanted["way"] == "train" else Table(DIM, wanted["rule"])

        def dataset() -> Any:
            clicks = clicks_of(wanted["ids"], 0)
            if wanted["way"] == "train":
                arrays = (clicks.ids, clicks.dense, clicks.labels)
            else:
                arrays = (clicks.ids.reshape(len(clicks.ids), -1),)
            return tf.data.Dataset.from_tensor_slices(arrays).shuffle(len(clicks.ids)).repeat()

        if wanted["way"] == "train":
            step = model.step
        else:

            def step(ids: Any) -> None:
                pull_and_push(model, ids, wanted)

        return run_on_workers(coordinator, seat.size - 2, dataset, step)

    serve(seat, make, lambda: os._exit(0))


def main() -> None:
    seat = Seat.from_arguments()
    everybody = addresses(seat)
    cluster = tf.train.ClusterSpec({"ps": everybody[:1], "worker": everybody[1:-1]})
    if seat.rank == seat.size - 1:
        coordinate(seat, cluster)
        return
    job, number = ("ps", 0) if seat.rank == 0 else ("worker", seat.rank - 1)
    server = tf.distribute.Server(cluster, job_name=job, task_index=number, protocol="grpc", start=True)
    serve(seat, serves, lambda: os._exit(0))
    del server


main()
