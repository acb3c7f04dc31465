"""One experiment: learn a task, extract features, score every row of the table; and its files.

A run is one strategy and one seed. After each task every row moves its old prototypes by its
compensator, adds those of the new classes and classifies all test images so far. To add a
compensator, write a function of (old prototypes, Drift) and enter it in COMPENSATORS.
"""
import argparse
import contextlib
import copy
import datetime
import functools
import hashlib
import io
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import torchvision
from torch.utils._pytree import tree_map_only

import data
import ldc
import report
import strategies
from beyond import Anchor, ScatterStore, adc_update, at_most_32, lda
from data import UserError, chunk_size
from ldc import (PROJECTORS, PrototypeStore, fit_projector, herding, ncm, paired_pass, sdc_update,
                 to_float64, worse_than_identity)

# --------------------------------------------------------------------------------------------------
# Presets: flag > scale > data set > strategy > default, for the settings of strategies and the
# options of compensators alike.

OPTIONS = {  # name -> (default, help); P paper, S supplement, ldc the authors' code
    "projector": ("linear", "p_F of the row ldc: " + ", ".join(PROJECTORS)),  # P
    "ldc_epochs": (20, "epochs of Adam on p_F"),  # P
    "ldc_lr": (1e-3, "learning rate of Adam on p_F"),  # P
    "ldc_batch_size": (128, "images per step of Adam on p_F"),  # ldc
    # one cached pass is ten times faster than the authors' way and as good (0.08 points, 3 seeds)
    "ldc_passes": (1, "augmented passes for Adam; the authors: one per epoch; 0: clean images"),
    "ridge": (1e-3, "pull of the row ldc-ridge towards the identity"),  # ours
    "anchor_ridge": (1e-4, "the same of the row ldc-anchor"),  # ours
    "anchor_width": (1024, "numbers of phi(x) that ldc-anchor has; 512: the first layer's"),  # ours
    "lda_shrink": (1.0, "pull of the lda read-out towards a sphere"),  # ours
    "sdc_sigma": (0.3, "width of SDC's kernel"),  # S
    "adc_alpha": (25.0, "length of ADC's steps"),  # ldc exps/lwf.json, as the next two
    "adc_steps": (3, "number of ADC's steps"),
    "adc_images": (100, "images that ADC perturbs for each class"),
    "metric": ("cosine", "of nearest means: cosine (the authors' code) or euclidean (paper)"),
    # the only published prototype code of the self-supervised half (POCON's) has them
    "unit_features": (False, "features have unit norm before prototypes and drift, too"),
}
OPTIONS_BY_DATASET = {
    "imagenet100": dict(sdc_sigma=1.0),  # S
    # P, Table 2; few images and a large MLP, which one cached pass would teach by heart: 20 passes
    "cars": dict(projector="mlp", ldc_lr=5e-3, ldc_epochs=100, ldc_passes=20),
}
OPTIONS_BY_SCALE = {
    # small batches give Adam about the paper's number of steps, 800, on fewer images; at its rate
    # of 1e-3 it does not arrive
    "demo": dict(ldc_lr=0.01, ldc_batch_size=50, adc_images=20),
    "smoke": dict(ldc_epochs=20, ldc_batch_size=16, ldc_passes=1, adc_images=4),
}
# Shares of the paper's epochs and batches, the widest ResNet-18, and images per class (limit).
SCALES = {
    "paper": dict(first_epochs=1, epochs=1, width=64, batch_size=1, limit=None),
    "small": dict(first_epochs=0.25, epochs=0.15, width=16, batch_size=1, limit=None),
    "demo": dict(first_epochs=0.1, epochs=0.08, width=8, batch_size=0.25, limit=None),
    "smoke": dict(first_epochs=0.01, epochs=0.01, width=8, batch_size=0.25, limit=20),
}


def preset_settings(strategy, dataset, scale):
    """What a strategy trains with: scale > data set > strategy."""
    chosen = strategies.STRATEGIES[strategy]
    share = SCALES[scale]
    settings = {**chosen.defaults, **chosen.by_dataset.get(dataset, {})}
    for name, value in settings.items():
        factor = share["first_epochs" if name.startswith("first_") else "epochs"]
        if name.endswith("epochs"):
            settings[name] = max(1, round(value * factor))
        elif name.endswith("milestones"):
            settings[name] = tuple(max(1, round(epoch * factor)) for epoch in value)
    settings["batch_size"] = round(settings["batch_size"] * share["batch_size"])
    settings["width"] = min(settings["width"], share["width"])
    if "projector_width" in settings:
        settings["projector_width"] = settings["projector_width"] * share["width"] // 64
    return {**settings, **chosen.by_scale.get(scale, {})}


def preset_options(strategy, dataset, scale):
    """What compensators work with: scale > data set > strategy > default."""
    return {**{name: value for name, (value, _) in OPTIONS.items()},
            **strategies.STRATEGIES[strategy].ldc_options,
            **OPTIONS_BY_DATASET.get(dataset, {}),
            **OPTIONS_BY_SCALE.get(scale, {})}


# --------------------------------------------------------------------------------------------------
# Compensators: (old prototypes (C, d), what may be seen of the drift) -> moved prototypes (C, d).


def needs(*what, linear=False):
    """Mark what a compensator needs beside paired features, and whether it can move a scatter too.

    what: "networks"; "anchor", prototypes [phi-mean, P]; "old images" and "exemplars" under f_t,
    "all labels" (not exemplar-free). A linear one is also read out with lda, as the row <name>+lda.
    """
    def mark(compensator):
        compensator.needs = what
        compensator.linear = linear
        return compensator

    return mark


@torch.no_grad()
def features(model, images, transform):
    """Features of uint8 images (N, 3, S, S) under a frozen model, (N, d)."""
    return torch.cat([model(transform(x)) for x in images.split(chunk_size(images))])


@dataclass
class Drift:
    """What a compensator may look at after task t: current images through both networks."""
    feats_old: torch.Tensor  # the clean images under f_{t-1}, (N, d)
    feats_new: torch.Tensor  # the same images under f_t, (N, d)
    options: SimpleNamespace
    seed: int = 0
    old_model: object = None  # f_{t-1}; this and the next two are missing in a replay
    new_model: object = None  # f_t
    task: object = None  # task[index] gives its clean images
    phi: torch.Tensor | None = None  # the images' fixed random features, (N, a)
    # old classes under f_t, for the rows that are not exemplar-free
    oracle: dict = field(default_factory=dict)  # unit_features -> ScatterStore
    exemplars: list = field(default_factory=list)  # nme: features (k, d) for each class
    projectors: dict = field(default_factory=dict)

    @functools.cached_property
    def augmented(self):
        """A pair (feats_old, feats_new) for each of `ldc_passes` augmented passes."""
        generator = torch.Generator().manual_seed(self.seed)
        passes = []
        for _ in range(self.options.ldc_passes):
            pieces = self.task.images.split(chunk_size(self.task.images))
            views = (self.task.augment(x, generator) for x in pieces)
            passes.append(paired_pass(self.old_model, self.new_model, views))
        return passes

    def projector(self, kind="linear", solver="adam", anchored=False):
        """p_F of Eq. 1, fitted once and shared by all rows that it moves."""
        key = kind, solver, anchored
        if key not in self.projectors:
            o = self.options
            pairs = [(self.feats_old, self.feats_new)]
            if solver == "adam" and o.ldc_passes:
                pairs = self.augmented[:o.ldc_passes]
            if anchored:
                pairs = [(torch.cat([self.phi, self.feats_old], 1), self.feats_new)]
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)  # a resumed run fits what an undisturbed one fits
                self.projectors[key] = fit_projector(
                    *zip(*pairs), projector=kind, solver=solver, epochs=o.ldc_epochs, lr=o.ldc_lr,
                    batch_size=o.ldc_batch_size, ridge=o.anchor_ridge if anchored else o.ridge)
        return self.projectors[key]

    def warning(self):
        """A sentence about the first p_F that does harm, if one does."""
        found = (worse_than_identity(p_F, self.feats_old, self.feats_new)
                 for (*_, anchored), p_F in self.projectors.items() if not anchored)
        return next(filter(None, found), "")

    @property
    def true_store(self):
        """The true means and scatter of the old classes under f_t."""
        return self.oracle[self.options.unit_features]


def none(prototypes, drift):
    """no compensation"""
    return prototypes


def sdc(prototypes, drift, unit=False):
    """semantic drift compensation: the mean drift of the images around a prototype"""
    sigma = drift.options.sdc_sigma
    return sdc_update(prototypes, drift.feats_old, drift.feats_new, sigma, unit)


def sdc_unit(prototypes, drift):
    """ours: SDC's kernel on unit-norm features"""
    return sdc(prototypes, drift, unit=True)


def projected(description, kind=None, solver="adam", linear=False):
    """A compensator that moves prototypes by p_F; kind: of PROJECTORS, or what --projector says."""
    @needs(linear=linear)
    def update(prototypes, drift):
        return drift.projector(kind or drift.options.projector, solver)(prototypes)

    update.__doc__ = description
    return update


@needs("anchor", linear=True)
def ldc_anchor(prototypes, drift):
    """ours: the closed form from [phi(x), f(x)], phi a fixed random function of the image"""
    moved = drift.projector("linear", "ridge", anchored=True)(prototypes)
    return torch.cat([prototypes[:, :-moved.shape[1]], moved], 1)  # phi-means stay


@needs("networks")
def adc(prototypes, drift):
    """adversarial drift compensation: images perturbed towards each old class"""
    o = drift.options
    return adc_update(prototypes, drift.task, drift.old_model, drift.new_model,
                      feats_old=drift.feats_old, alpha=o.adc_alpha, steps=o.adc_steps,
                      nearest=o.adc_images, limits=drift.task.pixel_range,
                      batch_size=chunk_size(drift.task.images))


def nme(m):
    @needs("old images", "exemplars")
    def update(prototypes, drift):
        # differs: PyCIL normalises each exemplar's feature, and uses exemplars for new classes too
        return torch.stack([feats[:m].mean(0) for feats in drift.exemplars])

    update.__doc__ = f"nearest mean of exemplars, with {m} stored for each class"
    return update


@needs("old images", "all labels", linear=True)
def oracle(prototypes, drift):
    """true means of all old images, the upper bound"""
    return drift.true_store.means


MEMORY = (1, 5, 10, 20, 50)  # images per class that the nme rows keep
COMPENSATORS = {
    "none": none,
    "sdc": sdc,
    "ldc": projected("LDC: p_F by Adam"),
    "ldc+bias": projected("Table 5: with a bias", "linear+bias"),
    "ldc+relu": projected("Table 5: with a ReLU", "linear+relu"),
    "ldc-mlp": projected("Table 5: a two-layer MLP", "mlp"),
    "adc": adc,
    **{f"nme-{m}": nme(m) for m in MEMORY},
    "oracle": oracle,
    "sdc-unit": sdc_unit,
    "ldc-ridge": projected("ours: p_F in closed form", "linear", "ridge", linear=True),
    "ldc-anchor": ldc_anchor,
}


def needed(names):
    """All that these compensators need beside paired features."""
    return {what for name in names for what in getattr(COMPENSATORS[name], "needs", ())}


def default_rows(strategy, dataset):
    """The compensators of a run that names none; the costly ones where they are worth it."""
    chosen = strategies.STRATEGIES[strategy]
    if chosen.reads_old_tasks:
        return ["none", "oracle"]
    every = chosen.costly_rows and dataset != "demo"
    return [name for name in COMPENSATORS
            if every or not needed([name]) & {"networks", "exemplars"}]


# --------------------------------------------------------------------------------------------------
# Rows: what is scored after each task.


def label_sets(strategy):
    """Keys of the labelled parts that prototypes are made from: "0.25" a share, "n50" a number."""
    shares = [f"{share:g}" for share in strategy.prototype_labels]
    return shares + [f"n{count}" for count in strategy.stored]


def labelled_images(task, label_set, seed):
    """Numbers of the task's images that are labelled in a set of labels."""
    if label_set.startswith("n"):
        return task.labelled(None, seed, count=int(label_set[1:]))[0]
    return task.labelled(float(label_set), seed)[0]


@dataclass
class Observation:
    """All that scoring needs after a task, so that a kept run can be scored without training."""
    classes: range  # the task's
    feats: torch.Tensor  # its clean training images under f_t, (N, d)
    labels: torch.Tensor  # (N,)
    labelled: dict  # set of labels -> numbers of the labelled images
    test_feats: torch.Tensor  # test images of all classes so far under f_t, (M, d)
    test_labels: torch.Tensor  # (M,)
    phi: torch.Tensor | None = None  # the training images' fixed random features, (N, a)
    drift: Drift | None = None  # None in the first task, and where the backbone stands still
    predictions: dict = field(default_factory=dict)  # row -> set of labels -> (M,)


class Row:
    """One row of the result: how one classifier does, task by task."""

    def __init__(self, name, label_set):
        self.name = name
        self.label_set = label_set
        self.store = PrototypeStore()
        self.curves = {"accuracy": [], "matrix": [], "first_tasks": {"2": [], "3": []},
                       "oracle_distance": []}

    def update(self, observed):
        """Take in a task."""


class PredictedRow(Row):
    """Classified elsewhere: "head", the strategy's own, and "pixels", nearest mean on pixels."""

    def classify(self, observed, options):
        return observed.predictions[self.name][self.label_set]


class PrototypeRow(Row):
    """Prototypes that a compensator moves, read out by the nearest mean."""

    def __init__(self, name, label_set, compensator):
        super().__init__(name, label_set)
        self.compensator = compensator

    def move(self, drift):
        """Eq. 2."""
        try:
            self.store.move(lambda p: COMPENSATORS[self.compensator](p, drift))
        except ValueError as error:
            raise UserError(f"the row {self.name}: {error}") from None

    def update(self, observed):
        """Move the old prototypes, then add those of the new classes."""
        if observed.drift is not None:
            self.move(observed.drift)
        needs = needed([self.compensator])
        index = slice(None) if "all labels" in needs else observed.labelled[self.label_set]
        feats = observed.feats[index]
        if "anchor" in needs:
            feats = torch.cat([observed.phi[index], feats], 1)
        self.store.add(feats, observed.labels[index], observed.classes)
        self.prototypes = self.store.means[:, -observed.feats.shape[1]:]  # without phi-means

    def read_out(self, feats, classes, options):
        """Eq. 3 among the first classes: (N, d) -> (N,)."""
        return ncm(feats, self.prototypes[:classes], options.metric)

    def classify(self, observed, options):
        return self.read_out(observed.test_feats, len(self.prototypes), options)

    def score_first_tasks(self, observed, sizes, options):
        """Figure 1: images and candidates of the first tasks alone."""
        for k, curve in self.curves["first_tasks"].items():
            classes = sum(sizes[:int(k)])
            early = observed.test_labels < classes
            predictions = self.read_out(observed.test_feats[early], classes, options)
            curve.append(accuracy(predictions, observed.test_labels[early]))


class LdaRow(PrototypeRow):
    """The same, whitened by a scatter that moves along."""

    def __init__(self, name, label_set, compensator):
        super().__init__(name, label_set, compensator)
        self.store = ScatterStore()

    def move(self, drift):
        if "old images" in needed([self.compensator]):
            self.store = copy.copy(drift.true_store)  # with the oracle's scatter
        else:
            super().move(drift)

    def read_out(self, feats, classes, options):
        d = feats.shape[1]
        covariance = self.store.covariance()[-d:, -d:]
        return lda(feats, self.prototypes[:classes], covariance, options.lda_shrink)


def make_rows(compensators, sets, predicted):
    """The rows of a run, `predicted` without prototypes; Table 6's counts are about LDC alone."""
    rows = []
    for label_set in sets:
        counted = label_set.startswith("n")
        for name in compensators:
            if not counted or name == "ldc":
                rows.append(PrototypeRow(name, label_set, name))
            if not counted and getattr(COMPENSATORS[name], "linear", False):
                rows.append(LdaRow(f"{name}+lda", label_set, name))
        rows += [PredictedRow(name, label_set) for name in predicted
                 if name == "head" or not counted]
    return rows


OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)


def accuracy(predictions, labels):
    return 100 * to_float64(predictions == labels).mean().item()


def with_unit_norm(observed):
    """The same observation through networks whose features have unit norm."""
    def unit(x):
        return tree_map_only(torch.Tensor, F.normalize, x)

    drift = observed.drift
    if drift is not None:
        old_model, new_model = drift.old_model, drift.new_model
        drift = replace(drift, feats_old=unit(drift.feats_old), feats_new=unit(drift.feats_new),
                        exemplars=unit(drift.exemplars), old_model=lambda x: unit(old_model(x)),
                        new_model=lambda x: unit(new_model(x)))
        drift.augmented = unit(observed.drift.augmented)
    return replace(observed, feats=unit(observed.feats), test_feats=unit(observed.test_feats),
                   drift=drift)


def score(rows, observed, sizes, options):
    """Move the old prototypes, append the new ones, classify: one more number in every curve."""
    if options.unit_features:
        observed = with_unit_norm(observed)
    for row in list(rows):
        try:
            row.update(observed)
        except OUT_OF_MEMORY as error:  # the others go on
            print(f"the row {row.name} is left out from now on: {error}", file=sys.stderr)
            rows.remove(row)
    oracles = {row.label_set: row.store.means for row in rows if row.name == "oracle"}
    for row in rows:
        predictions = row.classify(observed, options)
        row.curves["accuracy"].append(accuracy(predictions, observed.test_labels))
        row.curves["matrix"].append(by_task(predictions, observed.test_labels, sizes))
        if isinstance(row, PrototypeRow):
            row.score_first_tasks(observed, sizes, options)
            if row.label_set in oracles:
                distance = 1 - F.cosine_similarity(row.prototypes, oracles[row.label_set])
                row.curves["oracle_distance"].append([round(d, 5) for d in distance.tolist()])


def by_task(predictions, labels, sizes):
    """Accuracy on the test images of each task; sizes: classes per task."""
    edges = [0, *itertools.accumulate(sizes)]
    parts = [(labels >= a) & (labels < b) for a, b in itertools.pairwise(edges)]
    return [accuracy(predictions[part], labels[part]) for part in parts]


def summarise(curves):
    """A_last, A_inc (mean over tasks, the first included), forgetting (mean drop from the best)."""
    matrix = curves["matrix"]
    drops = [max(line[s] for line in matrix[s:-1]) - matrix[-1][s] for s in range(len(matrix) - 1)]
    return {"A_last": curves["accuracy"][-1],
            "A_inc": sum(curves["accuracy"]) / len(curves["accuracy"]),
            "forgetting": sum(drops) / len(drops) if drops else 0.0}


def by_labels(rows, value):
    """Set of labels -> row -> value(row), the order in which result.json has them."""
    found = {}
    for row in rows:
        found.setdefault(row.label_set, {})[row.name] = value(row)
    return found


def result_rows(rows):
    return by_labels(rows, lambda row: {**row.curves, **summarise(row.curves)})


# --------------------------------------------------------------------------------------------------
# One run.


class Log:
    """Seconds per phase, a line of log.jsonl per epoch, and one live line on the terminal."""

    def __init__(self):
        self.path = os.devnull  # log.jsonl
        self.tasks = None  # how many there will be
        self.seconds = defaultdict(float)  # of each phase
        self.shown = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name):
        """Count the seconds of a phase, the device's own work included."""
        start = time.perf_counter()
        self.live(name)
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds[name] += time.perf_counter() - start

    def epoch(self, task, epoch, epochs, loss, began):
        """End of an epoch."""
        self.write({"task": task + 1, "epoch": epoch + 1, "loss": loss})
        seconds = (time.perf_counter() - began) / (epoch + 1) * (epochs - epoch - 1)
        left = datetime.timedelta(seconds=int(seconds))
        self.live(f"task {task + 1} of {self.tasks or '?'}  epoch {epoch + 1} of {epochs}  "
                  f"loss {loss:.3f}  training ends in {left}")

    def live(self, line):
        """A line that the next one overwrites, or once a minute where no terminal is watching."""
        if sys.stderr.isatty() or time.perf_counter() - self.shown > 60:
            self.show(line, end="")

    def show(self, line, end="\n"):
        self.shown = time.perf_counter()
        terminal = sys.stderr.isatty()
        print("\r\x1b[K" + line if terminal else line, end=end if terminal else "\n",
              file=sys.stderr, flush=True)

    def write(self, event):
        """One more line of log.jsonl."""
        with open(self.path, "a") as file:
            file.write(json.dumps({"time": round(time.time(), 1), **event}) + "\n")


class Terminated(BaseException):
    """SIGTERM came, and what could be saved in time is saved."""


class Progress:
    """An interrupted task: a file from which training goes on after its last saved epoch.

    SIGTERM, as from Slurm, saves at the end of the epoch if that comes within 30 seconds.
    """

    every = 600  # seconds between two saves

    def __init__(self, path, identity, device):
        self.path = path
        self.identity = json.loads(json.dumps(identity))
        self.kept = read_tensors(path, device) if path.exists() else {}
        if self.kept:
            check_same_experiment(path.parent, self.kept["identity"], self.identity)
        self.saved = time.perf_counter()
        self.cost = 0.0  # seconds of a save
        self.terminating = False

    def find(self, task, phase):
        """The last saved state of a phase of this task, or None."""
        return self.kept["phases"].get(phase) if self.kept.get("task") == task else None

    def due(self, last):
        """At the end of a phase, else after a while that makes saving at most 2 % of the time."""
        wait = max(self.every, 50 * self.cost)
        return last or self.terminating or time.perf_counter() - self.saved > wait

    def save(self, task, phase, state):
        began = time.perf_counter()
        phases = self.kept["phases"] if self.kept.get("task") == task else {}
        self.kept = {"identity": self.identity, "task": task, "phases": {**phases, phase: state}}
        write_tensors(self.path, self.kept)
        self.saved = time.perf_counter()
        self.cost = self.saved - began
        self.stop_if_terminating()

    def stop_if_terminating(self):
        if self.terminating:
            raise Terminated

    @contextlib.contextmanager
    def heeding_sigterm(self):
        def give_up(*_):
            raise Terminated

        def terminate(*_):
            self.terminating = True
            signal.alarm(30)

        if not hasattr(signal, "alarm"):  # Windows
            yield
            return
        before = {number: signal.signal(number, handler) for number, handler in
                  ((signal.SIGTERM, terminate), (signal.SIGALRM, give_up))}
        try:
            yield
        finally:
            signal.alarm(0)
            for number, handler in before.items():
                signal.signal(number, handler)


class Run:
    """One strategy, one seed: what is kept between two tasks, and what happens within one."""

    def __init__(self, args, dataset, seed):
        self.log = Log()
        self.stream = data.TaskStream(dataset, tasks=args.tasks, first_classes=args.first_classes,
                                      seed=seed if args.order_seed is None else args.order_seed,
                                      device=args.device)
        self.strategy = strategies.STRATEGIES[args.strategy](
            args.settings, dataset.image_size, seed=seed, device=args.device, amp=args.amp,
            weights_file=args.weights_file, log=self.log)
        self.args = args
        self.seed = seed
        self.options = SimpleNamespace(**args.options)
        self.label_sets = label_sets(self.strategy)
        # where nothing drifts, every compensator would do nothing
        self.compensators = ["none"] if self.strategy.frozen_after_first else args.compensators
        self.needs = needed(self.compensators)
        predicted = ("head", "pixels") if hasattr(self.strategy, "classify") else ("pixels",)
        self.rows = make_rows(self.compensators, self.label_sets, predicted)
        self.tasks_done = 0
        self.model = None  # f_t
        self.anchor = Anchor().to(args.device)
        self.exemplars = {}  # class -> numbers of its images, in nme's order
        self.test_feats = []  # of earlier tasks, if the backbone is frozen

    def step(self):
        """One task: learn, observe, score; returns the observation."""
        self.learn()
        task = self.stream.task(self.tasks_done)
        with self.log.phase("features"):
            observed = self.observe(task)
        with self.log.phase("score"):
            self.classify_otherwise(task, observed)
            score(self.rows, observed, self.stream.sizes[:self.tasks_done + 1], self.options)
        self.tasks_done += 1
        warning = observed.drift and observed.drift.warning()
        if warning:
            self.log.show(f"task {self.tasks_done}: {warning}; look at ldc-ridge.")
        return observed

    def learn(self):
        """f_{t-1} -> f_t: the strategy's turn."""
        open_task = self.stream.merged if self.strategy.reads_old_tasks else self.stream.task
        with self.log.phase("load"):
            task = open_task(self.tasks_done)
        with self.log.phase("train"):
            self.strategy.learn(task)

    # Observe

    def observe(self, task):
        """Everything that scoring needs of the networks after the current task."""
        t = self.tasks_done
        old_model = self.model
        self.model = self.strategy.snapshot()
        drift = phi = None
        if "anchor" in self.needs:
            phi = features(self.anchor, task.clean_images, task.clean)
            phi = phi[:, :self.options.anchor_width].clone()  # of a view the whole would be kept
        if t and not self.strategy.frozen_after_first:
            pieces = task.clean_images.split(chunk_size(task.clean_images))
            pairs = paired_pass(old_model, self.model, map(task.clean, pieces))
            drift = Drift(*pairs, self.options, strategies.seed_of(self.seed, t, 4), old_model,
                          self.model, task, phi)
            feats = drift.feats_new
            if "old images" in self.needs:
                drift.oracle, drift.exemplars = self.look_at_old_classes()
        else:
            feats = features(self.model, task.clean_images, task.clean)
        test_feats, test_labels = self.test_features(t, task.clean)
        if not (feats.isfinite().all() and test_feats.isfinite().all()):
            raise UserError(f"features after task {t + 1} are not finite numbers; a lower "
                            "--lr or --first-lr usually helps.")
        if "exemplars" in self.needs:
            for c in task.classes:
                self.exemplars[c] = herding(feats[task.labels == c], max(MEMORY))
        labelled = {key: labelled_images(task, key, self.seed) for key in self.label_sets}
        return Observation(task.classes, feats, task.labels, labelled, test_feats, test_labels,
                           phi, drift)

    def test_features(self, t, transform):
        """Test images of all classes so far, (M, d) and (M,); a standing backbone adds new ones."""
        tests = list(self.stream.test(t))
        if not self.strategy.frozen_after_first:
            self.test_feats = []
        for images, _ in tests[len(self.test_feats):]:
            self.test_feats.append(features(self.model, images, transform))
        return torch.cat(self.test_feats), torch.cat([labels for _, labels in tests])

    def look_at_old_classes(self):
        """The only reader of old images in an exemplar-free run; it serves oracle and nme alone."""
        oracle = {False: ScatterStore(), True: ScatterStore()}
        exemplars = []
        for task in self.stream.reopen_finished_tasks(self.tasks_done - 1, reader="oracle"):
            feats = features(self.model, task.clean_images, task.clean)
            for unit, store in oracle.items():
                store.add(F.normalize(feats) if unit else feats, task.labels, task.classes)
            exemplars += [feats[task.labels == c][self.exemplars[c]] for c in task.classes
                          if c in self.exemplars]
            del task  # its images go before the next ones come
        return oracle, exemplars

    def classify_otherwise(self, task, observed):
        """Predictions of the strategy's own head, and of the floor: nearest mean on the pixels."""
        if hasattr(self.strategy, "classify"):
            head = self.strategy.classify(observed.test_feats)
            observed.predictions["head"] = dict.fromkeys(self.label_sets, head)

        def pixels(x):
            return at_most_32(x).flatten(1)

        train = features(pixels, task.clean_images, task.clean)
        tests = torch.cat([features(pixels, images, task.clean)
                           for images, _ in self.stream.test(self.tasks_done)])
        observed.predictions["pixels"] = {}
        for row in self.rows:
            if row.name == "pixels":
                index = observed.labelled[row.label_set]
                row.store.add(train[index], observed.labels[index], task.classes)
                observed.predictions["pixels"][row.label_set] = ncm(tests, row.store.means)

    # What is left behind

    def save(self, folder, context):
        """A checkpoint, then result.json with its name and SHA-256, then the one before goes."""
        path = folder / f"checkpoint-{self.tasks_done}.pt"
        stores = by_labels(self.rows, lambda row: vars(row.store))
        sha256 = write_tensors(path, {"strategy": self.strategy.state(), "stores": stores,
                                      "exemplars": self.exemplars})
        result = {**context,
                  "finished": self.tasks_done == self.stream.num_tasks,
                  "tasks_done": self.tasks_done,
                  "rows": result_rows(self.rows),
                  "seconds": dict(self.log.seconds),
                  "peak_memory_mb": torch.cuda.max_memory_allocated() // 2 ** 20,
                  "class_order": self.stream.class_order,
                  "class_names": self.stream.class_names,
                  "task_sizes": self.stream.sizes,
                  "checkpoint": path.name,
                  "sha256": sha256}
        write_json(folder / "result.json", result)
        for old in set(folder.glob("checkpoint-*.pt")) - {path}:
            old.unlink()
        return result

    def load(self, folder, result):
        """Go on from what `save` wrote."""
        state = read_tensors(folder / result["checkpoint"], self.stream.device, result["sha256"])
        self.strategy.load_state(state["strategy"])
        self.log.seconds.update(result["seconds"])
        self.model = self.strategy.snapshot()
        self.tasks_done = result["tasks_done"]
        self.exemplars = state["exemplars"]
        # rows that ran out of memory are not there
        self.rows = [row for row in self.rows if row.name in result["rows"][row.label_set]]
        for row in self.rows:
            vars(row.store).update(state["stores"][row.label_set][row.name])
            row.curves = result["rows"][row.label_set][row.name]

    def report_task(self):
        """The accuracies of the last task: all in the log, the main ones on the terminal."""
        found = by_labels(self.rows, lambda row: row.curves["accuracy"][-1])
        self.log.write({"task": self.tasks_done, "accuracy": found})
        rows = found[f"{max(self.strategy.prototype_labels):g}"]
        shown = [f"{name} {rows[name]:5.1f}" for name in ("head", "none", "sdc", "ldc", "oracle")
                 if name in rows]
        self.log.show("  ".join([f"task {self.tasks_done} of {self.stream.num_tasks}", *shown]))


# With the seed and the data, what makes two runs the same experiment.
IDENTITY = ("dataset", "strategy", "scale", "tasks", "first_classes", "order_seed", "image_size",
            "limit", "generated", "amp", "settings", "options", "compensators")


def run_seed(args, dataset, seed):
    """Learn all tasks for one seed, or those that are left; returns result.json's content."""
    strategy = args.strategy + (f"-{args.tag}" if args.tag else "")
    folder = Path(args.out_dir, args.scale, args.dataset, strategy, f"seed{seed}")
    identity = {name: getattr(args, name) for name in IDENTITY}
    identity.update(seed=seed, data=dataset.fingerprint)
    result = read_json(folder / "result.json")
    if result:
        check_same_experiment(folder, result, json.loads(json.dumps(identity)))
        if result["finished"]:
            print(f"{folder} is finished, nothing to do.", file=sys.stderr)
            return result
    run = Run(args, dataset, seed)  # before a folder is made: wrong settings leave nothing
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        if result:
            run.load(folder, result)
        progress = Progress(folder / "progress.pt", identity, run.stream.device)
        run.strategy.progress = progress
        context = {"command": args.command, **identity, "changed": args.changed,
                   **provenance(run.stream.device)}
        run.log.path = folder / "log.jsonl"
        run.log.write(context)
        run.log.tasks = args.tasks
        if args.amp and args.device == "cpu" and not re.search(r"bf16\b", cpuinfo()):
            run.log.show("--amp: this CPU seems to have no bfloat16, training will crawl")
        with progress.heeding_sigterm():
            while run.tasks_done < args.tasks:
                observed = run.step()
                if args.keep_features:
                    keep(folder / feature_file(run.tasks_done - 1), observed)
                del observed  # with the task's images, before the next task's are loaded
                result = run.save(folder, context)
                progress.path.unlink(missing_ok=True)
                run.report_task()
                progress.stop_if_terminating()
    return result


def check_same_experiment(folder, before, now):
    """A folder in which a task was learnt holds one experiment: other settings need another."""
    before, now = ({**one, **one["settings"], **one["options"]} for one in (before, now))
    for name, value in now.items():  # older versions wrote fewer keys
        if not isinstance(value, dict) and before.get(name, value) != value:
            raise UserError(f"{folder} holds a run with {name} {before[name]}, but {value} was "
                            "asked for; give the new run another --tag or --out-dir.")


# --------------------------------------------------------------------------------------------------
# A finished run: scored again without training, or used.


def feature_file(t):
    return f"features-{t + 1:02d}.pt"


def keep(path, observed):
    """Write what scoring needs after a task."""
    kept = {**vars(observed), "classes": [observed.classes.start, observed.classes.stop]}
    drift = observed.drift
    if drift is not None:
        kept["drift"] = {"feats_old": drift.feats_old, "seed": drift.seed,
                         "augmented": drift.augmented, "exemplars": drift.exemplars,
                         "oracle": {unit: vars(store) for unit, store in drift.oracle.items()}}
    write_tensors(path, kept)


def restore(path, options):
    """The observation that `keep` wrote; its drift has no networks."""
    kept = read_tensors(path)
    observed = Observation(**{**kept, "classes": range(*kept["classes"]), "drift": None})
    if observed.phi is not None:
        observed.phi = observed.phi[:, :options.anchor_width]
    if kept["drift"]:
        seen = kept["drift"]
        drift = Drift(seen["feats_old"], observed.feats, options, seen["seed"], phi=observed.phi)
        drift.augmented = seen["augmented"]
        drift.exemplars = seen["exemplars"]
        drift.oracle = {unit: ScatterStore(**store) for unit, store in seen["oracle"].items()}
        observed.drift = drift
    return observed


def replay(args):
    """Score a kept run again, with other rows or options; returns the content of result.json."""
    folder = Path(args.replay)
    out = folder.parent.with_name(f"{folder.parent.name}-{args.tag or 'replay'}") / folder.name
    if (out / "result.json").exists():
        raise UserError(f"{out} holds a replay already: delete it, or give another --tag.")
    files = sorted(folder.glob("features-*.pt"))
    recorded = read_json(folder / "result.json")
    if not (files and recorded):
        raise UserError(f"{folder} holds no kept run: expected result.json and features-*.pt; "
                        "run ldc.py with --keep-features first.")
    if [path.name for path in files] != [feature_file(t) for t in range(recorded["tasks_done"])]:
        raise UserError(f"{folder} has kept the features of some tasks only: run it again with "
                        "--keep-features from the start.")
    check_registered(recorded)
    compensators = args.compensators or [name for name in recorded["compensators"]
                                         if "networks" not in needed([name])]
    preset = preset_options(recorded["strategy"], recorded["dataset"], recorded["scale"])
    options = {**preset, **recorded["options"], **args.option_flags}
    rows = None
    for t, path in enumerate(files):
        observed = restore(path, SimpleNamespace(**options))
        check_replay(folder, observed.drift, compensators)
        rows = rows or make_rows(compensators, list(observed.labelled), observed.predictions)
        score(rows, observed, recorded["task_sizes"][:t + 1], SimpleNamespace(**options))
    changed = {name: value for name, value in options.items() if value != preset[name]}
    kept = {name: value for name, value in recorded["changed"].items() if name not in OPTIONS}
    result = {**recorded, "command": args.command, "replay_of": recorded["command"],
              "options": options, "changed": {**kept, **changed}, "compensators": compensators,
              "commit": commit(), "tasks_done": len(files), "rows": result_rows(rows)}
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "result.json", result)
    return result


def check_registered(recorded):
    """UserError where a run's strategy or one of its rows is not known to this process."""
    for kind, names, known in (("strategy", [recorded["strategy"]], strategies.STRATEGIES),
                               ("row", recorded["compensators"], COMPENSATORS)):
        for name in names:
            if name not in known:
                raise UserError(f"the {kind} {name} is not registered here: run this from the file "
                                f"that registers it, as {recorded['command']} did.")


def check_replay(folder, drift, compensators):
    """UserError where the kept features are not enough for these rows and options."""
    if drift is None:
        return
    missing = {"networks"}
    missing |= set() if drift.oracle else {"old images"}
    missing |= set() if drift.exemplars else {"exemplars"}
    missing |= set() if drift.phi is not None else {"anchor"}
    for name in compensators:
        if needed([name]) & missing:
            raise UserError(f"the row {name} needs {' and '.join(sorted(needed([name]) & missing))}"
                            f", of which {folder} has kept nothing: leave it out.")
    if drift.options.ldc_passes > len(drift.augmented):
        raise UserError(f"{folder} has kept {len(drift.augmented)} augmented passes: expected "
                        "--ldc-passes of at most that.")
    if "anchor" not in missing and drift.phi.shape[1] < drift.options.anchor_width:
        raise UserError(f"{folder} has kept {drift.phi.shape[1]} numbers of phi(x): expected "
                        "--anchor-width of at most that.")


# The row that predicts is the first of these that a run has.
PREDICTS = ("ldc-anchor", "ldc-ridge", "ldc", "none")


class Classifier:
    """The backbone and prototypes of a run: image files in, (class name, cosine similarity) out."""

    def __init__(self, folder, row=None, device="cpu"):
        folder = Path(folder)
        result = read_json(folder / "result.json")
        if not (result and result.get("checkpoint")):
            raise UserError(f"{folder} holds no trained run: expected result.json and a "
                             "checkpoint; run ldc.py first.")
        check_registered(result)
        state = read_tensors(folder / result["checkpoint"], device, result["sha256"])
        dataset = "demo" if result["generated"] else result["dataset"]
        self.transform = data.Transform(dataset, result["image_size"])
        strategy = strategies.STRATEGIES[result["strategy"]](
            result["settings"], self.transform.image_size, device=device)
        strategy.load_state(state["strategy"])
        stores = state["stores"][f"{max(strategy.prototype_labels):g}"]
        stores = {name: stores[name] for name in stores if name in COMPENSATORS}
        row = row or next(name for name in PREDICTS if name in stores)
        if row not in stores:
            raise UserError(f"{folder} has no row {row}; it has {', '.join(stores)}.")
        self.model = strategy.snapshot()
        self.prototypes = stores[row]["means"][:, -strategy.dim:]  # without phi-means
        self.metric = result["options"]["metric"]
        self.names = result["class_names"]
        self.device = device

    @torch.no_grad()
    def __call__(self, paths):
        """[(class name, cosine similarity)] of the image files at these paths, or at one path."""
        paths = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        answers = []
        for i in range(0, len(paths), 64):  # never all decoded at once
            images = torch.stack([self.transform.decode(path) for path in paths[i:i + 64]])
            feats = self.model(self.transform.clean(images.to(self.device)))
            labels = ncm(feats, self.prototypes, self.metric)
            similarity = F.cosine_similarity(feats, self.prototypes[labels])
            answers += [(self.names[c], s) for c, s in zip(labels.tolist(), similarity.tolist())]
        return answers


# --------------------------------------------------------------------------------------------------
# Files: <out-dir>/<scale>/<dataset>/<strategy>/seed<k>/{log.jsonl, result.json with all numbers,
# checkpoint-<tasks>.pt with all tensors}


def write_file(path, content):
    """Bytes, under a temporary name that is then renamed: a killed run leaves no half file."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path, content):
    """A line for each key, and in result.json for each row."""
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()]
    text = re.sub(r'("[^"]*": {"accuracy")', r"\n\1", ",\n".join(lines))
    write_file(path, f"{{\n{text}\n}}\n".encode())


def read_json(path):
    """The object in a JSON file, None if there is no such file."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: expected a JSON object; delete the folder.")
    return content


def write_tensors(path, content):
    """torch.save; returns the SHA-256 of the file."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_file(path, buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def read_tensors(path, device="cpu", sha256=None):
    """What write_tensors wrote, and nothing else if a SHA-256 is given."""
    try:
        content = path.read_bytes()
        if sha256 and hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises whatever its reader trips over first
        raise UserError(f"{path} is missing or damaged ({type(error).__name__}): restore it, or "
                        f"delete {path.parent} and run again.") from None

    def place(x):
        """On the device, but float64 on the CPU where the device is MPS, which has none."""
        return x if str(device) == "mps" and x.dtype == torch.float64 else x.to(device)

    return tree_map_only(torch.Tensor, place, state)


@contextlib.contextmanager
def held(folder):
    """Hold a run's folder against other processes."""
    try:
        with data.locked(folder / "lock"):
            for leftover in folder.glob("*.tmp"):
                leftover.unlink()
            yield
    except BlockingIOError:
        raise UserError(f"Another run is at work in {folder}: wait for it.") from None


def commit():
    """The commit of this code, None outside git or without it."""
    # by a shell, for which a missing git is no error
    git = subprocess.run("git rev-parse HEAD", shell=True, cwd=Path(__file__).parent,
                         capture_output=True, text=True)
    return git.stdout.strip() or None


def cpuinfo():
    """What Linux says of the processor, "" elsewhere."""
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def provenance(device):
    """Versions, device, threads, processor, commit: what the last digits of a result depend on."""
    cpu = re.findall(r"^model name\s*: (.*)$", cpuinfo(), re.M)[:1]
    return {"python": sys.version.split()[0],
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
            "threads": torch.get_num_threads(),
            "cpu": " ".join([*cpu, torch.backends.cpu.get_cpu_capability()]),
            "commit": commit()}


# --------------------------------------------------------------------------------------------------
# The command line.


class Parser(argparse.ArgumentParser):
    """One line for a mistake, instead of the whole usage."""

    def error(self, message):
        raise UserError(f"{message}; see python ldc.py --help.")


FLAGS = {  # title -> flag -> (default, or the type of one that has none; help)
    "the run": {
        "dataset": ("demo", "%(choices)s; demo is generated"),
        "data_dir": ("data", "where data sets are or go; for folder: {train,test}/<class>/*"),
        "strategy": ("lwf", "see below"),
        "scale": (str, "%(choices)s; small is for a CPU (paper, demo for the demo)"),
        "seed": ((0,), "one run each; class order, initialisation and all draws"),
        "order_seed": (int, "one class order for all seeds (each has its own)"),
        "tasks": (int, "number of tasks (10, demo 5)"),
        "first_classes": (int, "classes in the first task (as in the others)"),
        "image_size": (int, "resolution for --dataset folder (64)"),
        "generated": (bool, "generated images stand in for the data set's, whose presets stay"),
        "limit": (int, "images used of each class (all, smoke 20)"),
        "compensators": ((str,), "rows, see below; all for each of them (all but the costly ones, "
                         "which lwf and finetune have too)"),
        "out_dir": ("runs", "holds <scale>/<dataset>/<strategy>/seed<k>"),
        "tag": (str, "added to the strategy's folder name, to keep runs apart"),
        "keep_features": (False, "keep each task's features, for --replay"),
        "show_settings": (False, "print what this command would run with, and exit"),
    },
    "the machine": {
        "device": ("auto", "%(choices)s; auto takes cuda, then mps, then cpu"),
        "amp": (bool, "train in bfloat16, also on a CPU that has it (on CUDA cards that have it)"),
    },
    "a finished run": {
        "replay": (str, "score this folder's kept features: other --compensators, options, --tag"),
        "predict": ((str,), "classify image files, or all in a folder, with the run in --run"),
        "run": (str, "folder of that run"),
        "row": (str, "row whose prototypes predict (the first it has of " +
                ", ".join(PREDICTS) + ")"),
    },
}


def described():
    """Strategies and rows, a line each, for --help."""
    lines = []
    for title, things in (("strategies", strategies.STRATEGIES), ("rows", COMPENSATORS)):
        lines += [f"{title}:"]
        lines += [f"  {name:<12}{(thing.__doc__ or ' ').splitlines()[0]}"
                  for name, thing in things.items()]
    return "\n".join(lines)


def build_parser():
    """A flag for everything in FLAGS, every setting of a strategy, every compensator's option."""
    choices = {"dataset": data.DATASETS, "strategy": strategies.STRATEGIES, "scale": SCALES,
               "compensators": ["all", *COMPENSATORS], "device": ("auto", "cuda", "mps", "cpu"),
               "projector": PROJECTORS, "metric": ("cosine", "euclidean"), **strategies.CHOICES}
    presets = {}
    for strategy in strategies.STRATEGIES.values():
        presets = {**strategy.defaults, **presets}
    settings = {name: (presets[name], text) for name, text in strategies.SETTINGS.items()}
    parser = Parser(
        prog="ldc.py", allow_abbrev=False, usage="python ldc.py [flags]",
        description=ldc.__doc__.split("\n")[0] + " Defaults are in brackets.", epilog=described(),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=32, width=118))
    for title, flags in {**FLAGS, "settings of strategies (see --show-settings)": settings,
                         "options of compensators (see --show-settings)": OPTIONS}.items():
        add = parser.add_argument_group(title).add_argument
        for name, (value, text) in flags.items():
            several = value if isinstance(value, tuple) else (value,)
            default = value
            kind = type(several[0])
            if kind is type:
                kind = several[0]
                default = [] if several is value else None
            elif kind is not bool and title in FLAGS:
                text += f" ({' '.join(map(str, several))})"
            more = {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, "NAME"),
                    "choices": choices.get(name), "nargs": "+" if several is value else None}
            if kind is bool:
                more = {"action": argparse.BooleanOptionalAction if value is bool else "store_true"}
            if title not in FLAGS:
                default = argparse.SUPPRESS
            add("--" + name.replace("_", "-"), default=default, help=text, **more)
    return parser


RANGES = (  # of numbers, by the first pattern that is in a setting's name
    ("seed", lambda x: 0 <= x < 2 ** 32, "0 to 4294967295"),
    ("anchor_width", lambda x: 1 <= x <= 1024, "1 to 1024"),
    ("buffer_size|warmup_epochs|ldc_passes|milestones", lambda x: x >= 0, "at least 0"),
    ("tasks|classes|limit|size|width|epochs|steps|images", lambda x: x >= 1, "at least 1"),
    ("fraction|prototype_labels", lambda x: 0 < x <= 1, "more than 0, at most 1"),
    ("(lr|sigma|alpha|factor)$", lambda x: 0 < x < math.inf, "more than 0"),
    ("", lambda x: 0 <= x < math.inf, "0 or more"))


def check_range(name, value):
    for number in value if isinstance(value, (list, tuple)) else [value]:
        if type(number) in (int, float):
            fits, expected = next(rule[1:] for rule in RANGES if re.search(rule[0], name))
            if not fits(number):
                raise UserError(f"--{name.replace('_', '-')} {number}: expected {expected}.")


def resolve(args):
    """Fill in what depends on other flags; UserError where they contradict each other."""
    flags = dict(vars(args))
    for name, value in flags.items():
        check_range(name, value)
    if args.tag and not re.fullmatch(r"[\w.+=-]+", args.tag):
        raise UserError(f"--tag {args.tag}: expected letters, digits and any of . _ + = -")
    demo = args.dataset == "demo"
    args.scale = args.scale or ("demo" if demo else "paper")
    args.tasks = args.tasks or (5 if demo else 10)
    args.limit = args.limit or SCALES[args.scale]["limit"]
    args.seed = list(dict.fromkeys(args.seed))
    args.every_row = bool(args.compensators)
    if "all" in args.compensators:
        args.compensators = list(COMPENSATORS)
    if not (args.compensators or args.replay):
        args.compensators = default_rows(args.strategy, args.dataset)
    resolve_presets(args, flags)
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(),
                 "cpu": True}
    if args.device == "auto":
        args.device = next(name for name in available if available[name])
    if not available[args.device]:
        raise UserError(f"--device {args.device} is not available here; use --device auto or cpu.")
    if args.amp is None:  # cards before Ampere emulate bfloat16, and crawl
        args.amp = args.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def resolve_presets(args, flags):
    """Settings and options: presets, then flags; and what the flags have changed."""
    which = args.strategy, args.dataset, args.scale
    settings = preset_settings(*which)
    options = preset_options(*which)
    setting_flags = {name: flags[name] for name in flags if name in strategies.SETTINGS}
    for name in setting_flags.keys() - settings.keys():
        has = ", ".join("--" + known.replace("_", "-") for known in settings)
        raise UserError(f"strategy {args.strategy} has no setting --{name.replace('_', '-')}; "
                        f"it has {has}.")
    args.option_flags = {name: flags[name] for name in flags if name in OPTIONS}
    args.settings = {**settings, **setting_flags}
    args.options = {**options, **args.option_flags}
    preset = {**settings, **options, "limit": SCALES[args.scale]["limit"], "first_classes": None,
              "tasks": 5 if args.dataset == "demo" else 10, "order_seed": None, "generated": None}
    now = {**vars(args), **args.settings, **args.options}
    args.changed = {name: now[name] for name, value in preset.items()
                    if json.dumps(now[name]) != json.dumps(value)}


def open_data(args):
    """The data set; missing weights are said before an image is decoded."""
    strategies.check_backbone(args.settings["backbone"])
    args.weights_file = strategies.find_weights(SimpleNamespace(**args.settings), args.data_dir)
    name = "demo" if args.generated else args.dataset
    dataset = data.load(name, args.data_dir, image_size=args.image_size, limit=args.limit)
    if data.DATASETS[name].classes not in (None, dataset.num_classes):
        args.changed["classes"] = dataset.num_classes  # a part of it fills no table of the paper
    return dataset


def carry_out(args):
    """What the flags ask for: show settings, classify images, replay a run, or train."""
    if args.show_settings:
        shown = {name: getattr(args, name) for name in (*IDENTITY, "seed", "device")}
        shown = {**shown.pop("settings"), **shown.pop("options"), **shown}
        print("\n".join(f"{name}: {value}" for name, value in shown.items()))
    elif args.predict:
        if not args.run:
            raise UserError("--predict needs --run, the folder of a finished run.")
        paths = [file for path in args.predict
                 for file in (data.list_images(path) if Path(path).is_dir() else [path])]
        answers = Classifier(args.run, args.row, args.device)(paths)
        for path, (name, similarity) in zip(paths, answers):
            print(f"{path}: {name} (cosine similarity {similarity:.3f})")
    elif args.replay:
        print(report.run_table([replay(args)]))
    else:
        dataset = open_data(args)
        results = [run_seed(args, dataset, seed) for seed in args.seed]
        print(report.run_table(results, every_row=args.every_row))
    sys.stdout.flush()


def main(argv=None):
    """The command line; returns the exit code."""
    try:
        args = build_parser().parse_args(argv)
        words = sys.argv[1:] if argv is None else argv
        args.command = shlex.join(["python", Path(sys.argv[0]).name, *words])
        resolve(args)
        torch.backends.cudnn.benchmark = True
        carry_out(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has read what it wants; Python would complain at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}; check the folder, its rights and the "
              "space left, and run again.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command continues after its last saved epoch.",
              file=sys.stderr)
        return 130
    except Terminated:
        print("\nterminated; the same command continues after its last saved epoch.",
              file=sys.stderr)
        return 143
    return 0
