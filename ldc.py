"""Learnable Drift Compensation (LDC) for continual learning without stored exemplars, ECCV 2024.

The first half is the method and needs torch alone: prototypes, ldc_update() (Eq. 1 and 2), its rivals, the classifier
(Eq. 3). The second half is one run (a strategy learns task after task, every compensator is scored after each) and the
command line:

    python ldc.py                                      generated images, two minutes on a laptop
    python ldc.py --dataset cifar100 --seed 0 1 2 3 4  the paper's setting
"""
import argparse
import contextlib
import copy
import functools
import hashlib
import json
import os
import re
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

# ==================================================================================================================
# The method
# ==================================================================================================================
# Prototypes: the stored mean of each class, all that remains of an old task.


def class_means(feats, labels, classes):
    """Mean feature of each class: feats (N, d), labels (N,), classes an iterable of C labels -> (C, d)."""
    member = (labels == torch.as_tensor(list(classes), device=labels.device)[:, None]).to(feats)  # (C, N)
    return member @ feats / member.sum(1, keepdim=True)


def precise(x):
    """The tensor in float64, on the CPU where the device has no float64 (MPS)."""
    return (x.cpu() if x.device.type == "mps" else x).double()


class PrototypeStore:
    """One raw mean per class seen, in the current feature space; beside it one pooled within-class scatter for `lda`.

    The scatter S is kept as a factor R with R^T R = S, because a linear map p_F moves R's rows exactly as it moves
    prototypes: (R W)^T (R W) = W^T S W.
    """

    def __init__(self, means=None, factor=None, count=0):
        self.means, self.factor, self.count = means, factor, count  # (C, d), (d, d), images behind the factor

    def move(self, update, linear=False):
        """Replace the old prototypes by update(prototypes); linear=True moves the scatter by the same map."""
        if linear and self.factor is not None:
            moved = update(torch.cat([self.means, self.factor.to(self.means)]))
            self.means, self.factor = moved[:len(self.means)], precise(moved[len(self.means):])
        else:
            self.means = update(self.means)

    def add(self, feats, labels, classes):
        """Append the means of new classes; called after the old ones were moved, so none is corrected twice."""
        means = class_means(feats, labels, classes)
        self.means = means if self.means is None else torch.cat([self.means, means])

    def add_scatter(self, feats, labels, classes):
        """Add the new classes' scatter around their means to the pooled one."""
        first = torch.as_tensor(list(classes), device=labels.device)[0]
        centred = precise(feats - class_means(feats, labels, classes)[labels - first])
        scatter = centred.T @ centred
        if self.factor is not None:
            scatter = scatter + self.factor.T @ self.factor
        values, vectors = torch.linalg.eigh(scatter)  # not Cholesky: dead ReLU units make the scatter singular
        self.factor, self.count = values.clamp(min=0).sqrt()[:, None] * vectors.T, self.count + len(feats)

    def covariance(self):
        """Pooled within-class covariance, (d, d) in float64."""
        return self.factor.T @ self.factor / self.count


# Eq. 1 and 2: learn a projector from the old feature space to the new one, move every old prototype with it.


def from_identity(a, b):
    """Ours: a linear p_F that begins at "nothing has moved", from where 800 steps of Adam at 1e-3 can reach the solution."""
    layer = nn.Linear(a, b, bias=False)
    nn.init.eye_(layer.weight)
    return layer


PROJECTORS = {  # Table 5; (old width, new width) -> p_F, in torch's default initialisation
    "linear": lambda a, b: nn.Linear(a, b, bias=False),
    "linear+bias": lambda a, b: nn.Linear(a, b),
    "linear+relu": lambda a, b: nn.Sequential(nn.Linear(a, b, bias=False), nn.ReLU()),
    # the paper says "two-layer MLP" and no more: one hidden layer as wide as the new features
    "mlp": lambda a, b: nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b)),
    "eye": from_identity,  # not in Table 5
}


def train_projector(projector, epoch_of_pairs, epochs, lr):
    """Eq. 1 by Adam: minimise the mean of (p_F(f_{t-1}(x)) - f_t(x))^2 over the pairs, both networks frozen.

    epoch_of_pairs() starts one epoch of batches (f_{t-1}(x), f_t(x)), each (B, d_old) and (B, d_new).
    """
    optimizer = torch.optim.Adam(projector.parameters(), lr=lr)
    for _ in range(epochs):
        for feats_old, feats_new in epoch_of_pairs():
            loss = F.mse_loss(projector(feats_old), feats_new)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    return projector.requires_grad_(False)


def solve_projector(pairs, ridge=1e-3):
    """Eq. 1 in closed form, one pass, float64: (G + lI)^-1 (C + lI) with G = A^T A, C = A^T B and l = ridge * mean of G's diagonal.

    Shrunk towards the identity: a direction that the current images do not excite is left where it is, not deleted.
    Between spaces of different width there is no identity, and the map is shrunk towards zero.
    """
    G = C = 0
    for feats_old, feats_new in pairs:
        A, B = precise(feats_old), precise(feats_new)
        G, C = G + A.T @ A, C + A.T @ B
    if not torch.is_tensor(G):
        raise ValueError("there is no batch of images to learn the projector from.")
    eye, device = torch.eye(len(G), dtype=G.dtype, device=G.device), feats_old.device
    shrink = (ridge * G.diagonal().mean()).clamp(min=1e-12)
    W = torch.linalg.solve(G + shrink * eye, C + shrink * eye if G.shape == C.shape else C)
    projector = nn.Linear(*W.shape, bias=False, device=device).requires_grad_(False)
    projector.weight.copy_(W.T)
    return projector


def fit_projector(feats_old, feats_new, *, projector="linear", solver="adam", epochs=20, lr=1e-3, batch_size=128,
                  ridge=1e-3):
    """p_F from paired features: feats_old (N, d_old) and feats_new (N, d_new), row i of both the same image -> module.

    Lists of such matrices are several augmented passes over the images, used in turn, one an epoch.
    """
    passes = [(feats_old, feats_new)] if torch.is_tensor(feats_old) else list(zip(feats_old, feats_new))
    check_projector(projector, solver)
    if solver == "ridge":
        return solve_projector(passes, ridge)
    p_F = PROJECTORS[projector](passes[0][0].shape[1], passes[0][1].shape[1]).to(passes[0][0].device)
    turn = iter(range(epochs))

    def epoch_of_pairs():
        old, new = passes[next(turn) % len(passes)]
        order = torch.randperm(len(old)).to(old.device)
        return ((old[i], new[i]) for i in order.split(batch_size))

    return train_projector(p_F, epoch_of_pairs, epochs, lr)


def ldc_update(prototypes, old_model, new_model, batches, *, projector="linear", solver="adam", epochs=20, lr=1e-3,
               ridge=1e-3):
    """Move old prototypes (C, d_old) into the new feature space, (C, d_new): Eq. 1, then Eq. 2.

    old_model, new_model: any callables from images to features (N, d), of any two widths, on the prototypes' device.
    batches: any re-iterable of image tensors, or of tuples that start with one, such as a DataLoader over the current
    task; labels are not read. solver="adam" forwards every batch in every epoch, as the authors do, so that each epoch
    may see fresh augmentation; solver="ridge" is the closed form and takes one pass.
    """
    check_projector(projector, solver)
    if iter(batches) is batches and solver == "adam" and epochs > 1:
        raise ValueError("batches can be read only once but training takes several epochs: pass a list or a DataLoader.")

    def epoch_of_pairs():
        for batch in batches:
            x = (batch if torch.is_tensor(batch) else batch[0]).to(prototypes.device)
            with torch.no_grad():
                pair = old_model(x).float(), new_model(x).float()
            yield pair

    with eval_mode(old_model, new_model):
        if solver == "ridge":
            p_F = solve_projector(epoch_of_pairs(), ridge)
        else:
            first = next(epoch_of_pairs(), None)
            if first is None:
                raise ValueError("there is no batch of images to learn the projector from.")
            p_F = PROJECTORS[projector](first[0].shape[1], first[1].shape[1]).to(prototypes.device)
            train_projector(p_F, epoch_of_pairs, epochs, lr)
    return p_F(prototypes.float()).to(prototypes.dtype)  # Eq. 2


def check_projector(projector, solver):
    if projector not in PROJECTORS or solver not in ("adam", "ridge") or (solver == "ridge" and projector != "linear"):
        raise ValueError(f"projector={projector!r} with solver={solver!r}: expected one of {', '.join(PROJECTORS)} with "
                         "'adam', or 'linear' with 'ridge'.")


@contextlib.contextmanager
def eval_mode(*models):
    """Models in eval mode for a while: batch statistics of the new task would shift old features and spoil running ones."""
    was_training = [(m, m.training) for model in models if isinstance(model, nn.Module) for m in model.modules()]
    for m, _ in was_training:
        m.training = False
    try:
        yield
    finally:
        for m, training in was_training:
            m.training = training


# The rivals: semantic drift compensation (SDC), adversarial drift compensation (ADC), nearest mean of exemplars (NME).


def sdc_update(prototypes, feats_old, feats_new, sigma=0.3, unit=False):
    """SDC Eq. 10-11: each prototype moves by the mean drift of the images around it, weighted by a Gaussian kernel.

    prototypes (C, d); feats_old, feats_new (N, d), row i of both the same image. unit=True measures the kernel's
    distances between unit-norm vectors, the scale that sigma was made for.
    """
    # differs: the authors' code takes feats_old and feats_new from two shuffled passes, so its rows are different images
    scale = (lambda x: F.normalize(x, dim=1)) if unit else (lambda x: x)
    distance = torch.cdist(scale(prototypes), scale(feats_old), compute_mode="donot_use_mm_for_euclid_dist")
    # the floor rules wherever the distance exceeds 4.8 sigma: there SDC is one global mean shift
    weight = torch.exp(-distance.square() / (2 * sigma ** 2)) + 1e-5
    return prototypes + weight @ (feats_new - feats_old) / weight.sum(1, keepdim=True)


def adc_update(prototypes, images, old_model, new_model, *, feats_old=None, alpha=25.0, steps=3, nearest=100, limits=None):
    """ADC: perturb current images until the old network takes them for an old class, then translate by their drift.

    prototypes (C, d); images (N, 3, H, W), or anything that returns them when indexed; feats_old (N, d) their old
    features; limits: smallest and largest pixel value.
    """
    with torch.no_grad():
        feats_old = old_model(images) if feats_old is None else feats_old
        distance = torch.cdist(prototypes, feats_old, compute_mode="donot_use_mm_for_euclid_dist")
    candidates = distance.topk(min(nearest, distance.shape[1]), largest=False).indices  # (C, m)
    low, high = limits or (images.min().item(), images.max().item())
    moved = prototypes.clone()  # differs: the authors overwrite prototypes that later classes are still compared with
    for c, prototype in enumerate(prototypes):
        clean = images[candidates[c]]
        attacked = attack(clean, prototype, old_model, alpha, steps, low, high)
        with torch.no_grad():
            found = torch.cdist(old_model(attacked), prototypes).argmin(1) == c
            success = found.any()  # where no attack succeeds, the unperturbed images serve
            used, keep = torch.where(success, attacked, clean), torch.where(success, found, True).to(prototypes)
            moved[c] += keep @ (new_model(used) - old_model(used)) / keep.sum()
    return moved


def attack(images, prototype, model, alpha, steps, low, high):
    """Gradient steps on the images towards a prototype, each of length alpha over the whole batch, clipped to the pixel range."""
    for _ in range(steps):
        images = images.detach().requires_grad_()
        loss = (model(images) - prototype).square().mean()
        gradient, = torch.autograd.grad(loss, images)
        images = (images - alpha * gradient / gradient.norm().clamp(min=1e-12)).clamp(low, high).detach()
    return images


def herding(feats, count):
    """iCaRL's ranking of one class: greedily the images whose running mean stays nearest the class mean; (n, d) -> (count,)."""
    feats = F.normalize(feats, dim=1)
    mean, total, chosen = feats.mean(0), torch.zeros_like(feats[0]), []
    free = torch.zeros(len(feats), device=feats.device)
    for k in range(1, min(count, len(feats)) + 1):
        best = ((mean - (total + feats) / k).norm(dim=1) + free).argmin()
        total, free = total + feats[best], free.index_fill(0, best, torch.inf)
        chosen.append(best)
    return torch.stack(chosen)


# Eq. 3: the classifier.


def ncm(feats, prototypes, metric="cosine"):
    """Eq. 3, nearest class mean: feats (N, d), prototypes (C, d) -> class indices (N,)."""
    if metric == "cosine":  # differs: the paper writes the Euclidean distance; the authors' code normalises both sides
        return (F.normalize(feats, dim=1) @ F.normalize(prototypes, dim=1).T).argmax(1)
    return torch.cdist(feats, prototypes).argmin(1)


def lda(feats, prototypes, covariance, shrink=1.0):
    """Ours: nearest class mean by cosine after whitening with one pooled covariance (d, d) -> class indices (N,)."""
    level = (shrink * covariance.diagonal().mean()).clamp(min=1e-6)  # one labelled image a class has no scatter: plain NCM
    regular = covariance + level * torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    whiten = torch.linalg.inv(torch.linalg.cholesky(regular)).T.to(feats)
    return ncm(feats @ whiten, prototypes @ whiten)


# Every compensator has one signature, (old prototypes, what may be seen of the drift) -> moved prototypes.


class Drift:
    """What a compensator may look at after task t: the current images through both networks. No label, no old image.

    feats_old, feats_new (N, d): the clean images through f_{t-1} and f_t, paired. views: lists of the same for a few
    augmented passes. Passes are made when a compensator first asks for them. images: the clean images, indexable.
    reopened: old classes under f_t, None unless a method that stores images (nme) or the oracle asks for them.
    """

    def __init__(self, old_model, new_model, extract_old, feats_new, extract_views, images, limits, options, reopened=None, seed=0):
        self.old_model, self.new_model, self.extract_old, self.feats_new = old_model, new_model, extract_old, feats_new
        self.extract_views, self.images, self.limits, self.options, self.seed = extract_views, images, limits, options, seed
        self.reopened, self.fitted = reopened, {}

    @functools.cached_property
    def feats_old(self):
        return self.extract_old()

    @functools.cached_property
    def views(self):
        return self.extract_views()

    def projector(self, kind="linear", solver="adam"):
        """p_F of Eq. 1, fitted once and shared by all prototypes that it moves."""
        if (kind, solver) not in self.fitted:
            o = self.options
            augmented = solver == "adam" and self.views[0]
            feats = self.views if augmented else (self.feats_old, self.feats_new)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)  # a resumed run fits what an undisturbed one fits
                self.fitted[kind, solver] = fit_projector(*feats, projector=kind, solver=solver, epochs=o.ldc_epochs,
                                                          lr=o.ldc_lr, batch_size=o.ldc_batch_size, ridge=o.ridge)
        return self.fitted[kind, solver]


MEMORY = (1, 5, 10, 20, 50)  # images per class that the nme rows keep
COMPENSATORS = {
    "none": lambda p, drift: p,
    "sdc": lambda p, drift: sdc_update(p, drift.feats_old, drift.feats_new, drift.options.sdc_sigma),
    "ldc": lambda p, drift: drift.projector(drift.options.projector)(p),
    "ldc+bias": lambda p, drift: drift.projector("linear+bias")(p),
    "ldc+relu": lambda p, drift: drift.projector("linear+relu")(p),
    "ldc-mlp": lambda p, drift: drift.projector("mlp")(p),
    "adc": lambda p, drift: adc_update(p, drift.images, drift.old_model, drift.new_model, feats_old=drift.feats_old,
                                       alpha=drift.options.adc_alpha, steps=drift.options.adc_steps,
                                       nearest=drift.options.adc_images, limits=drift.limits),
    **{f"nme-{m}": lambda p, drift, m=m: drift.reopened.exemplar_means(m) for m in MEMORY},
    "oracle": lambda p, drift: drift.reopened.means,
    # ours, not in the paper
    "sdc-unit": lambda p, drift: sdc_update(p, drift.feats_old, drift.feats_new, drift.options.sdc_sigma, unit=True),
    "ldc-eye": lambda p, drift: drift.projector("eye")(p),
    "ldc-ridge": lambda p, drift: drift.projector("linear", "ridge")(p),
}

# ==================================================================================================================
# One run: a strategy learns task after task; after each, every compensator moves its own prototypes and is scored
# ==================================================================================================================

OPTIONS = {  # name -> (value, help); P paper, S supplement, ldc the authors' code
    "projector": ("linear", "p_F of the row ldc: " + ", ".join(PROJECTORS)),
    "ldc_epochs": (20, "epochs of Adam on p_F"),  # P
    "ldc_lr": (1e-3, "learning rate of Adam on p_F"),  # P
    "ldc_batch_size": (128, "images per step of Adam on p_F"),  # ldc
    "ldc_passes": (1, "augmented passes whose features are kept and reused over the epochs; as many as epochs is the authors' way, 0 the clean images"),
    "ridge": (1e-3, "strength of the row ldc-ridge's pull towards the identity"),
    "lda_shrink": (1.0, "strength of the lda read-out's pull towards a spherical covariance"),
    "sdc_sigma": (0.3, "width of SDC's kernel"),  # S
    "adc_alpha": (25.0, "length of ADC's steps"),  # ldc exps/lwf.json, as the next two
    "adc_steps": (3, "number of ADC's steps"),
    "adc_images": (100, "images that ADC perturbs for each class"),
    "metric": ("cosine", "distance of the nearest-mean classifier: cosine (the authors' code) or euclidean (the paper)"),
}
OPTIONS_BY_DATASET = {
    "imagenet100": dict(sdc_sigma=1.0),  # S
    "cars": dict(projector="mlp", ldc_lr=5e-3, ldc_epochs=100),  # P, Table 2
}
OPTIONS_BY_STRATEGY = {name: dict(ldc_lr=5e-3, ldc_epochs=100, ldc_batch_size=256, ldc_passes=0)  # P, section 4.3; batch ours
                       for name in ("joint-ssl", "pfr", "cassle", "pocon", "nncsl")}
OPTIONS_BY_SCALE = {
    # small batches give Adam about the paper's number of steps, 800, on fewer images; at its 1e-3 it ends 2 points lower
    "demo": dict(ldc_lr=5e-3, ldc_batch_size=50, adc_images=20),
    "smoke": dict(ldc_epochs=20, ldc_batch_size=16, ldc_passes=1, adc_images=4),
}
OLD_IMAGE_ROWS = ("oracle", *(f"nme-{m}" for m in MEMORY))  # the rows that are not exemplar-free
LDA_ROWS = ("ldc-ridge", "oracle")  # rows that are also read out with lda, as <row>+lda
LIGHT_ROWS = [name for name in COMPENSATORS if name != "adc" and not name.startswith("nme")]
DEFAULT_ROWS = {"finetune": list(COMPENSATORS), "lwf": list(COMPENSATORS), "joint": ["none", "oracle"], "joint-ssl": ["none", "oracle"]}  # others: LIGHT_ROWS


def resolve_options(dataset, strategy, scale, overrides):
    """Settings of the compensators: flag > scale > strategy > data set > default."""
    defaults = {name: value for name, (value, _) in OPTIONS.items()}
    return {**defaults, **OPTIONS_BY_DATASET.get(dataset, {}), **OPTIONS_BY_STRATEGY.get(strategy, {}),
            **OPTIONS_BY_SCALE.get(scale, {}), **overrides}


@torch.no_grad()
def extract(model, images, transform):
    """Features of uint8 images (N, 3, S, S) under a frozen model, (N, d)."""
    pixels = 2 ** 16 if images.device.type == "cpu" else 2 ** 22  # what fits a core's cache is twice as fast there
    chunk = min(512, max(16, pixels // images.shape[-1] ** 2))
    return torch.cat([model(transform(x)) for x in images.split(chunk)])


class Reopened:
    """Old classes as f_t sees them, from their own images: the oracle's means and scatter, and the means of a few exemplars.

    The only reader of finished tasks in an exemplar-free run; its numbers reach the rows oracle and nme-m, nothing else.
    """

    def __init__(self, model, stream, up_to, exemplars):
        store, kept = PrototypeStore(), []
        for task in stream.reopen_finished_tasks(up_to, reader="oracle"):
            feats = extract(model, task.clean_images, task.clean)
            store.add(feats, task.labels, task.classes)
            store.add_scatter(feats, task.labels, task.classes)
            kept += [feats[task.labels == c][exemplars[c]] for c in task.classes if c in exemplars]
        self.means, self.factor, self.count, self.kept = store.means, store.factor, store.count, kept

    def exemplar_means(self, m):
        return torch.stack([feats[:m].mean(0) for feats in self.kept])


class Images:
    """Clean normalised images of a task, made when indexed, so that a task of large images is never held as floats."""

    def __init__(self, task):
        self.task = task
        extremes = task.clean(torch.stack([torch.zeros_like(task.clean_images[0]), torch.full_like(task.clean_images[0], 255)]))
        self.limits = extremes.min().item(), extremes.max().item()

    def __getitem__(self, index):
        return self.task.clean(self.task.clean_images[index])


def observe_drift(old, new, task, feats_new, options, seed, reopened):
    """The current task's images through f_{t-1} and f_t: a clean pass, and a few augmented ones."""
    def clean_pass():
        return extract(old, task.clean_images, task.clean)

    def augmented_passes():
        generator, views = torch.Generator().manual_seed(seed), ([], [])

        def augment(x):  # one draw, both networks
            x = task.augment(x, generator)
            return torch.cat([old(x), new(x)], 1)
        for _ in range(options.ldc_passes):
            pair = extract(lambda x: x, task.images, augment)
            views[0].append(pair[:, :-feats_new.shape[1]])
            views[1].append(pair[:, -feats_new.shape[1]:])
        return views

    images = Images(task)
    return Drift(old, new, clean_pass, feats_new, augmented_passes, images, images.limits, options, reopened, seed)


def score(predictions, labels, sizes=()):
    """Accuracy in % over all test images, and on those of each task (sizes: classes per task)."""
    correct, labels = precise(predictions == labels).cpu(), labels.cpu()
    edges = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return (100 * correct.mean().item(),
            [100 * correct[(labels >= a) & (labels < b)].mean().item() for a, b in zip(edges[:-1], edges[1:])])


def summarise(row):
    """A_last, A_inc (mean over tasks, the first included) and forgetting (mean drop from each old task's best accuracy)."""
    accuracy, matrix = row["accuracy"], row["matrix"]
    drops = [max(r[s] for r in matrix[s:-1]) - matrix[-1][s] for s in range(len(matrix) - 1)]
    row.update(A_last=accuracy[-1], A_inc=sum(accuracy) / len(accuracy), forgetting=sum(drops) / len(drops) if drops else 0.0)


class Run:
    """One strategy, one seed: what is kept between two tasks, and what happens within one.

    Prototypes and rows are kept per set of labelled images: "1", all of them, for supervised strategies; shares such as
    "0.05", "0.05@7" where the labels were drawn again with seed 7, and "n50" for 50 images of each class.
    """

    def __init__(self, strategy, stream, options, compensators, seed, first_task_file=None, label_seeds=()):
        self.strategy, self.stream, self.options, self.seed = strategy, stream, options, seed
        self.first_task_file = first_task_file
        if strategy.frozen_after_first:  # features do not drift: every compensator would leave prototypes where they are
            compensators = ["none"]
        sets = {f"{share:g}": (share, None) for share in strategy.label_fractions}
        sets.update({f"n{count}": (None, count) for count in strategy.stored})
        self.label_sets = {name + ("" if k == seed else f"@{k}"): (share, k, count) for name, (share, count) in sets.items()
                           for k in ([seed] if share == 1 else dict.fromkeys([seed, *label_seeds]))}  # what task.labelled() takes
        self.stores = {name: {row: PrototypeStore() for row in compensators if row == "ldc" or count is None}
                       for name, (_, _, count) in self.label_sets.items()}
        self.rows = {name: {} for name in self.stores}
        self.exemplars = {}  # class -> its images in the order that nme would keep them
        self.tasks_done, self.model = 0, None

    def learn_task(self):
        """Learn the next task (f_{t-1} -> f_t), move the old prototypes, append the new ones, evaluate."""
        t, old, monitor = self.tasks_done, self.model, self.strategy.monitor
        with monitor.phase("load"):
            task = self.stream.task(t)
            learnt = joint_task(self.stream, t) if self.strategy.reads_old_tasks else task
        self.learn(learnt)
        self.model = self.strategy.snapshot()
        with monitor.phase("features"):
            feats = extract(self.model, task.clean_images, task.clean)
            wanted = any(name in OLD_IMAGE_ROWS for stores in self.stores.values() for name in stores)
            reopened = Reopened(self.model, self.stream, t - 1, self.exemplars) if t and wanted else None
        with monitor.phase("compensate"):
            if t and not self.strategy.frozen_after_first:
                self.compensate(observe_drift(old, self.model, task, feats, self.options, self.seed * 1000 + t, reopened))
            self.append(feats, task)
        with monitor.phase("evaluate"):
            tests = [(extract(self.model, images, task.clean), labels) for images, labels in self.stream.test(t)]
            self.evaluate(t, *(torch.cat(parts) for parts in zip(*tests)))
        self.tasks_done += 1

    def learn(self, task):
        """The strategy's turn; the first task is taken from a run with the same recipe and seed where there is one."""
        shared = self.first_task_file if task.index == 0 else None
        state = read_checkpoint(shared, self.stream.device) if shared else None
        if state:
            self.strategy.load_state(state)
            self.strategy.finish(self.strategy.visible(task))
        else:
            self.strategy.learn(task)
            if shared:
                replace_file(shared, lambda f: torch.save({**self.strategy.state(), "memory": {}}, f))

    def compensate(self, drift):
        """Eq. 2 for every compensator and label set."""
        for stores in self.stores.values():
            for name, store in stores.items():
                store.move(lambda p: COMPENSATORS[name](p, drift), linear=name == "ldc-ridge")
                if name == "oracle":
                    store.factor, store.count = drift.reopened.factor, drift.reopened.count

    def append(self, feats, task):
        """Means of the new classes from their labelled images, and the exemplars that nme would keep."""
        for label_set, stores in self.stores.items():
            index, labels = task.labelled(*self.label_sets[label_set])
            for name, store in stores.items():
                few = name != "oracle"  # the oracle has all labels
                part, of = (feats[index], labels) if few else (feats, task.labels)
                store.add(part, of, task.classes)
                if name in LDA_ROWS:
                    store.add_scatter(part, of, task.classes)
        nme = any(name.startswith("nme") for stores in self.stores.values() for name in stores)
        for c in task.classes if nme else ():
            self.exemplars[c] = herding(feats[task.labels == c], max(MEMORY))

    def readouts(self, stores):
        """(row, prototypes, classifier of (features, prototypes)): NCM, lda where there is a covariance, a strategy's own head."""
        for name, store in stores.items():
            yield name, store.means, lambda f, p: ncm(f, p, self.options.metric)
            if name in LDA_ROWS:
                covariance = store.covariance()
                yield f"{name}+lda", store.means, lambda f, p: lda(f, p, covariance, self.options.lda_shrink)
        if hasattr(self.strategy, "classify"):
            yield "head", None, lambda f, p: self.strategy.classify(f)

    def evaluate(self, t, feats, labels):
        """One more line of every row: accuracy over all classes seen and per task, distance to the oracle."""
        for label_set, stores in self.stores.items():
            for name, means, classify in self.readouts(stores):
                row = self.rows[label_set].setdefault(name, {"accuracy": [], "matrix": [], "first_tasks": {"2": [], "3": []},
                                                             "oracle_distance": []})
                overall, by_task = score(classify(feats, means), labels, self.stream.sizes[:t + 1])
                row["accuracy"].append(overall)
                row["matrix"].append(by_task)
                summarise(row)
                if means is None:
                    continue
                for k, curve in row["first_tasks"].items():  # Figure 1: test images and candidates of the first k tasks
                    known = sum(self.stream.sizes[:min(int(k), t + 1)])
                    early = labels < known
                    curve.append(score(classify(feats[early], means[:known]), labels[early])[0])
                if "oracle" in stores and "@" not in label_set:  # labels drawn again are for the deviation of A_last
                    distance = 1 - F.cosine_similarity(means, stores["oracle"].means)
                    row["oracle_distance"].append([round(d, 5) for d in distance.tolist()])

    def state(self):
        """What a checkpoint holds: plain tensors, numbers and strings, so that weights_only=True loads it."""
        monitor = self.strategy.monitor
        return {"tasks_done": self.tasks_done, "strategy": self.strategy.state(), "exemplars": self.exemplars,
                "stores": {f: {name: vars(store) for name, store in stores.items()} for f, stores in self.stores.items()},
                "rows": json.dumps(self.rows), "seconds": dict(monitor.seconds), "images": monitor.images,
                "class_names": self.stream.class_names}

    def load_state(self, state):
        self.strategy.load_state(state["strategy"])
        self.stores = {f: {name: PrototypeStore(**kept) for name, kept in stores.items()} for f, stores in state["stores"].items()}
        self.tasks_done, self.exemplars, self.rows = state["tasks_done"], state["exemplars"], json.loads(state["rows"])
        self.strategy.monitor.seconds.update(state["seconds"])
        self.strategy.monitor.images, self.model = state["images"], self.strategy.snapshot()

    def result(self):
        """The content of result.json that this run can tell."""
        monitor = self.strategy.monitor
        seconds = {name: round(value, 2) for name, value in monitor.seconds.items()}
        return {"finished": self.tasks_done == self.stream.num_tasks, "tasks_done": self.tasks_done, "rows": self.rows,
                "seconds": seconds, "images_per_second": round(monitor.images / max(monitor.seconds["augment"] + monitor.seconds["step"], 1e-9), 1),
                "peak_memory_mb": peak_memory_mb(), "class_order": self.stream.class_order,
                "class_names": self.stream.class_names, "task_sizes": self.stream.sizes}


def joint_task(stream, t):
    """All training images of tasks 0..t as one task, for the upper bound only."""
    import data
    return data.merge_tasks([*stream.reopen_finished_tasks(t - 1, reader="joint"), stream.task(t)])


# Files. Names are deterministic; everything is written to a temporary name, then renamed.


def write_json(path, content):
    """JSON with a digest of itself, so that a damaged file is noticed."""
    text = json.dumps(content, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()
    replace_file(path, lambda f: f.write(json.dumps({**content, "digest": digest}, indent=1).encode()))


def read_json(path):
    """The content of a JSON file written by write_json, None where there is none; a damaged one raises ValueError."""
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    digest = content.pop("digest", None)
    if digest != hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest():
        raise ValueError("its digest does not match its content")
    return content


def replace_file(path, write):
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # two runs may write the same shared file
    with open(temporary, "wb") as f:
        write(f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def save_checkpoint(folder, state):
    """The newest checkpoint, and the one before it: where one is damaged, only the last task is learnt again."""
    newest = folder / "checkpoint.pt"
    if newest.exists():
        os.replace(newest, folder / "checkpoint-previous.pt")
    replace_file(newest, lambda f: torch.save(state, f))


def read_checkpoint(path, device="cpu"):
    """A checkpoint's content; None where there is none, or where it is damaged, which is said."""
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is None:  # checksums; torch.load does not verify them
                return torch.load(path, map_location=device, weights_only=True)
    except Exception:  # a file cut short raises whatever its reader trips over first
        pass
    print(f"{path} is damaged and not used.", file=sys.stderr)
    return None


def load_checkpoint(folder, device="cpu"):
    """The newest intact checkpoint of a run, or None."""
    return read_checkpoint(folder / "checkpoint.pt", device) or read_checkpoint(folder / "checkpoint-previous.pt", device)


@contextlib.contextmanager
def locked(folder):
    """Hold the run folder; a second run in it stops. The system frees the lock when the process ends, however it ends."""
    import fcntl
    with open(folder / "lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            from data import UserError
            raise UserError(f"Another run is at work in {folder}; wait for it, or choose another --out-dir.") from None
        yield


def most_labels(label_sets):
    """The largest share of labels among the names of label sets."""
    return max((name for name in label_sets if name[0] != "n" and "@" not in name), key=float)


class Progress:
    """One updating line with the time left; plain lines, at most one a minute, where stderr is not a terminal."""

    def __init__(self, total, log):
        self.total, self.log, self.done, self.began, self.shown = total, log, 0, time.time(), time.time()
        self.text, self.live = "", sys.stderr.isatty()

    def step(self, images):
        """Some more images were trained on."""
        self.done += images
        if time.time() - self.shown > (0.2 if self.live else 60):
            self.say(f"{self.text}  {self.left()} left", keep=not self.live)

    def epoch(self, task, epoch, loss):
        self.text = f"task {task + 1}  epoch {epoch + 1}  loss {loss:.3f}"
        self.write({"task": task + 1, "epoch": epoch + 1, "loss": loss})

    def left(self):
        if not self.done:  # the first task came from another run's file
            return "?"
        return duration((time.time() - self.began) / self.done * (self.total - self.done))

    def say(self, line, keep=True):
        self.shown = time.time()
        print(f"\r\x1b[K{line}" if self.live else line, end="\n" if keep else "", file=sys.stderr, flush=True)

    def write(self, event):
        """One JSON object a line; flushed, so that a killed run leaves its story behind."""
        with open(self.log, "a") as f:
            f.write(json.dumps({"time": round(time.time(), 1), **event}) + "\n")


def seconds_per_image(strategy, image_size):
    """Time of one training step per image, from a copy of the backbone; the frozen network of LwF makes it a third more."""
    backbone, images = copy.deepcopy(strategy.net["backbone"]), torch.rand(16, 3, image_size, image_size, device=strategy.device)
    start = time.perf_counter()
    strategy.embed(images, backbone).sum().backward()
    return (time.perf_counter() - start) / len(images) * 4 / 3


def duration(seconds):
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def peak_memory_mb():
    """Largest resident memory of the process and, on CUDA, the largest allocated on the device."""
    import resource
    peak = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2 ** 20 if sys.platform == "darwin" else 2 ** 10)}
    if torch.cuda.is_available():
        peak["cuda"] = torch.cuda.max_memory_allocated() // 2 ** 20
    return peak


def provenance(device):
    """Versions, device, threads, instruction set and commit: what the last digits of a result depend on."""
    import subprocess
    from importlib import metadata
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return {"python": sys.version.split()[0], "torch": torch.__version__, "torchvision": metadata.version("torchvision"),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type, "threads": torch.get_num_threads(),
            "cpu": processor(), "commit": git.stdout.strip() or None}


def processor():
    """The processor's name and model number where Linux tells them, and the instruction set that torch uses."""
    path = Path("/proc/cpuinfo")
    told = dict(re.findall(r"^(model name|model)\s*: (.*)$", path.read_text(), re.M)) if path.exists() else {}
    return " ".join([*(told[name] for name in ("model name", "model") if name in told), torch.backends.cpu.get_cpu_capability()])


def identity_of(args, seed):
    """What makes two runs the same experiment; the content of args.json."""
    return {"dataset": args.dataset, "strategy": args.strategy, "scale": args.scale, "seed": seed,
            "order_seed": seed if args.order_seed is None else args.order_seed, "tasks": args.tasks,
            "first_classes": args.first_classes, "image_size": args.image_size, "class_list": args.class_list, "limit": args.limit,
            "label_seeds": args.label_seeds, "generated": args.generated, "settings": args.settings, "options": args.options,
            "compensators": args.compensators}


def check_identity(folder, identity):
    """A folder in which a task was learnt holds one experiment: other settings need another folder."""
    from data import UserError
    try:
        before = read_json(folder / "args.json")
    except ValueError as error:
        raise UserError(f"{folder / 'args.json'} is damaged ({error}); delete the folder or choose another --out-dir.") from None
    for name, value in json.loads(json.dumps(identity)).items():
        if before and name in before and before[name] != value:  # what an older version did not know is not compared
            old = before[name]
            if isinstance(value, dict):
                name = next(n for n in {**value, **old} if value.get(n) != old.get(n))
                old, value = old.get(name), value.get(name)
            raise UserError(f"{folder} holds a run with {name} {old}, but {value} was asked for; repeat its settings, "
                            "or give the new run a --tag or an --out-dir of its own.")


def run_seed(args, seed):
    """Learn all tasks for one seed, or go on where an earlier call stopped; returns the content of result.json."""
    folder = Path(args.out_dir, args.scale, args.dataset, args.strategy + (f"-{args.tag}" if args.tag else ""), f"seed{seed}")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        identity = identity_of(args, seed)
        try:
            result = read_json(folder / "result.json")
        except ValueError as error:
            result = None
            print(f"{folder / 'result.json'} is damaged ({error}); it is made again from the checkpoint.", file=sys.stderr)
        if any(folder.glob("checkpoint*.pt")) or result and result["tasks_done"]:
            check_identity(folder, identity)
        if result and result["finished"]:
            print(f"{folder} is finished, nothing to do.", file=sys.stderr)
            return result
        with failure_recorded(folder, identity):
            run, device = open_run(args, identity), torch.device(args.device)
            checkpoint = load_checkpoint(folder, device)
            if checkpoint:
                run.load_state(checkpoint)
            elif result:
                print(f"{folder} has no intact checkpoint; starting again at task 1.", file=sys.stderr)
            write_json(folder / "args.json", identity)
            return learn_all(run, folder, {"command": args.command, **identity, **provenance(device)})


@contextlib.contextmanager
def failure_recorded(folder, identity):
    """Leave failed.json where a run breaks off by an error, for report.py to say which cell is missing and why."""
    from data import UserError
    record = folder / "failed.json"
    record.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        write_json(record, {**identity, "reason": f"{error}" if isinstance(error, UserError) else f"{type(error).__name__}: {error}"})
        raise


def open_run(args, identity):
    """Data, stream, strategy: everything that a run needs before its first task."""
    import data
    import strategies
    monitor, device = strategies.Monitor(), torch.device(args.device)
    with monitor.phase("load"):
        weights = strategies.find_weights(SimpleNamespace(**args.settings), args.data_dir)  # first: a missing file is said at once
        dataset = data.load("demo" if args.generated else args.dataset, args.data_dir, image_size=args.image_size, class_list=args.class_list,
                            limit=args.limit, workers=args.workers)
    stream = data.TaskStream(dataset, tasks=args.tasks, first_classes=args.first_classes, seed=identity["order_seed"], device=device)
    strategy = strategies.STRATEGIES[args.strategy](args.settings, dataset.image_size, seed=identity["seed"], device=device,
                                                    amp=args.amp, compile=args.compile)
    strategy.monitor, strategy.weights_file = monitor, weights
    return Run(strategy, stream, SimpleNamespace(**args.options), args.compensators, identity["seed"],
               first_task_file(args, identity, strategy), args.label_seeds)


def first_task_file(args, identity, strategy):
    """Where strategies that learn the first task alike (LwF, FeTrIL, FeCAM; PFR, CaSSLe) keep it for each other."""
    if strategy.first_task is None:
        return None
    recipe, settings = strategy.first_task
    key = {name: identity[name] for name in ("seed", "order_seed", "tasks", "first_classes", "image_size", "class_list", "limit")}
    key.update({name: args.settings[name] for name in settings}, **({"generated": True} if args.generated else {}))
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]
    folder = Path(args.out_dir, args.scale, args.dataset, "first-task")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{recipe}-seed{identity['seed']}-{digest}.pt"


def learn_all(run, folder, context):
    """Every task that is left, with a checkpoint and result.json after each."""
    strategy, stream = run.strategy, run.stream
    counts = [sum(stream.dataset.train_counts[c] for c in stream.class_order[sum(stream.sizes[:t]):sum(stream.sizes[:t + 1])])
              for t in range(stream.num_tasks)]
    passes = [strategy.epochs(t) * (sum(counts[:t + 1]) if strategy.reads_old_tasks else n) for t, n in enumerate(counts)]
    if run.first_task_file and run.first_task_file.exists():
        passes[0] = 0
    ahead = sum(passes[run.tasks_done:])
    if context["scale"] == "paper" and strategy.device.type == "cpu" and context["dataset"] != "demo":
        print(f"The paper's setting takes about {duration(seconds_per_image(strategy, stream.dataset.image_size) * ahead)} (h:m:s) on this "
              "CPU; --scale small shows the same in an hour or two.", file=sys.stderr)
    progress = Progress(ahead, folder / "log.jsonl")
    progress.write(context)
    strategy.monitor.on_step, strategy.monitor.on_epoch = progress.step, progress.epoch
    write_json(folder / "result.json", {**context, **run.result()})
    while run.tasks_done < stream.num_tasks:
        run.learn_task()
        save_checkpoint(folder, run.state())
        write_json(folder / "result.json", {**context, **run.result()})
        accuracy = {name: {row: values["accuracy"][-1] for row, values in rows.items()} for name, rows in run.rows.items()}
        progress.write({"task": run.tasks_done, "accuracy": accuracy})
        accuracy = accuracy[most_labels(accuracy)]
        shown = "  ".join(f"{name} {accuracy[name]:5.1f}" for name in ("head", "none", "sdc", "ldc", "oracle") if name in accuracy)
        progress.say(f"task {run.tasks_done}/{stream.num_tasks}  {sum(stream.sizes[:run.tasks_done])} classes  {shown}  {progress.left()} left")
    return {**context, **run.result()}


# Using the result.


class Classifier:
    """The backbone and prototypes that a run left behind: image files in, (class name, cosine similarity) out."""

    def __init__(self, folder, row=None, device="cpu"):
        import data
        import strategies
        folder = Path(folder)
        args, state = read_json(folder / "args.json"), load_checkpoint(folder, device)
        if args is None or state is None:
            raise data.UserError(f"{folder} holds no run: expected args.json and an intact checkpoint.pt there; run ldc.py first.")
        self.transform = data.Transform("demo" if args.get("generated") else args["dataset"], args["image_size"])
        strategy = strategies.STRATEGIES[args["strategy"]](args["settings"], self.transform.image_size, device=device)
        strategy.load_state(state["strategy"])
        stores = state["stores"][most_labels(state["stores"])]
        row = row or ("ldc" if "ldc" in stores else "none")
        if row not in stores:
            raise data.UserError(f"{folder} has no row {row}; it has {', '.join(stores)}.")
        self.model, self.prototypes, self.names, self.device = strategy.snapshot(), stores[row]["means"], state["class_names"], device

    @torch.no_grad()
    def __call__(self, paths):
        images = torch.stack([self.transform.decode(path) for path in paths]).to(self.device)
        feats = self.model(self.transform.clean(images))
        similarity, label = (F.normalize(feats, dim=1) @ F.normalize(self.prototypes, dim=1).T).max(1)
        return [(self.names[c], s) for c, s in zip(label.tolist(), similarity.tolist())]


# ==================================================================================================================
# The command line
# ==================================================================================================================


def flag_type(value):
    """argparse arguments for a flag whose preset holds this value."""
    if isinstance(value, bool):
        return {"action": argparse.BooleanOptionalAction}
    return {"type": type(value[0]), "nargs": "+"} if isinstance(value, tuple) else {"type": type(value)}


def build_parser():
    import data
    import strategies
    parser = argparse.ArgumentParser(prog="ldc.py", allow_abbrev=False, description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument_group("the run").add_argument
    add("--dataset", choices=list(data.DATASETS), default="demo", help="demo is generated; folder is your own {train,test}/<class>/*")
    add("--data-dir", default="data", help="where data sets are, or are downloaded to")
    add("--strategy", choices=list(strategies.STRATEGIES), default="lwf", help="how the backbone learns a task")
    add("--scale", choices=list(strategies.SCALES), help="paper: every setting as the paper has it; small: width 16 and 15 %% of "
        "the epochs; demo, smoke: less (default: demo for generated images, else paper)")
    add("--seed", type=int, nargs="+", default=[0], help="one run each; governs class order, initialisation and all draws")
    add("--order-seed", type=int, help="class order from a seed of its own (default: the run's seed)")
    add("--tasks", type=int, help="number of tasks (default: 10, and 5 for the demo)")
    add("--first-classes", type=int, help="classes in the first task (default: as many as in the others)")
    add("--image-size", type=int, help="resolution for --dataset folder")
    add("--generated", action="store_true", default=None, help="generated images stand in for the data set's, whose presets stay")
    add("--limit", type=int, help="use only so many images of each class, for a quick trial (default: all; 20 at scale smoke)")
    add("--class-list", help="file with one class folder a line, for imagenet100 and folder")
    add("--compensators", nargs="+", choices=list(COMPENSATORS), metavar="ROW",
        help=f"rows to compute, of {' '.join(COMPENSATORS)} (default: all; without adc and nme where the strategy is neither lwf nor finetune)")
    add("--label-seeds", type=int, nargs="+", default=[], metavar="K", help="draw the labelled images again with these seeds, on the same "
        "backbone (self-supervised strategies)")
    add("--out-dir", default="runs", help="results go to <out-dir>/<scale>/<dataset>/<strategy>/seed<k>; an interrupted run goes on there")
    add("--tag", help="added to the strategy's folder name, to keep a run with other settings apart")
    add("--repeat", metavar="FOLDER", help="run again what args.json in the folder of a finished run says, and compare; of all flags only "
        "--data-dir, --out-dir, --tag and the machine's count")
    add = parser.add_argument_group("the machine").add_argument
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="auto takes cuda, then mps, then cpu")
    add("--amp", action=argparse.BooleanOptionalAction, help="bfloat16 autocast (default: on CUDA only)")
    add("--compile", action="store_true", help="torch.compile the backbone: minutes to start, then faster steps")
    add("--deterministic", action="store_true", help="repeatable to the last bit on CUDA too; slower there, and the CPU always is")
    add("-j", "--workers", type=int, help="threads that decode images (default: all cores)")
    add = parser.add_argument_group("a finished run").add_argument
    add("--predict", nargs="+", metavar="IMAGE", help="classify image files with the run in --run and stop")
    add("--run", help="folder of that run")
    add("--row", choices=list(COMPENSATORS), metavar="ROW", help="whose prototypes --predict uses (default: ldc where there is one)")
    add = parser.add_argument_group("settings of the strategy (default: the preset of strategy, data set and scale)").add_argument
    values = {name: value for preset in strategies.PRESETS.values() for part in preset.values() for name, value in part.items()}
    for name, text in strategies.SETTINGS.items():
        add("--" + name.replace("_", "-"), **flag_type(values[name]), default=argparse.SUPPRESS, help=text)
    add = parser.add_argument_group("settings of the compensators (default: the preset of the data set)").add_argument
    for name, (value, text) in OPTIONS.items():
        add("--" + name.replace("_", "-"), **flag_type(value), default=argparse.SUPPRESS, help=f"{text} ({value})")
    return parser


def read_recorded(args, flags):
    """Every setting of a finished run from its args.json; its device and number of threads too, which rounding depends on."""
    from data import UserError
    folder = Path(args.repeat)
    try:
        identity, result = read_json(folder / "args.json"), read_json(folder / "result.json")
    except ValueError as error:
        raise UserError(f"{folder} is damaged ({error}); --repeat expects the folder of a finished run.") from None
    if not identity or not result or not result["finished"]:
        raise UserError(f"{folder} holds no finished run: --repeat expects a folder with its args.json and result.json.")
    if flags:
        raise UserError(f"--repeat takes every setting from {folder / 'args.json'}; leave out --{next(iter(flags)).replace('_', '-')}.")
    device = "cpu" if (args.device, result["device"]) == ("auto", "cpu") else args.device
    return {**identity, "seed": [identity["seed"]], "device": device, "threads": result["threads"]}


def largest_difference(rows, recorded):
    """Largest absolute difference of an accuracy between the rows of two runs, in points."""
    return max(abs(a - b) for labels in recorded for row in recorded[labels]
               for a, b in zip(rows[labels][row]["accuracy"], recorded[labels][row]["accuracy"]))


def resolve(args):
    """Fill in what depends on other flags: scale, device, settings, options; UserError where they contradict each other."""
    import strategies
    from data import UserError
    flags = {name: value for name, value in vars(args).items() if name in strategies.SETTINGS or name in OPTIONS}
    recorded = read_recorded(args, flags) if args.repeat else {}
    vars(args).update(recorded)
    demo = args.dataset == "demo"
    args.scale = args.scale or ("demo" if demo else "paper")
    args.tasks = (5 if demo else 10) if args.tasks is None else args.tasks
    args.limit = strategies.SCALES[args.scale]["limit"] if args.limit is None else args.limit
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit {args.limit} leaves no image: expected at least 1.")
    args.compensators = args.compensators or DEFAULT_ROWS.get(args.strategy, LIGHT_ROWS)
    if args.label_seeds and "label_fractions" not in strategies.PRESETS[args.strategy]["*"]:
        raise UserError(f"--label-seeds is for strategies that learn without labels; {args.strategy} trains on them.")
    args.settings = recorded.get("settings") or strategies.resolve_settings(
        args.strategy, args.dataset, args.scale, {n: flags[n] for n in flags if n in strategies.SETTINGS})
    args.options = recorded.get("options") or resolve_options(
        args.dataset, args.strategy, args.scale, {n: flags[n] for n in flags if n in OPTIONS})
    for name, expected in (("projector", tuple(PROJECTORS)), ("metric", ("cosine", "euclidean"))):
        if args.options[name] not in expected:
            raise UserError(f"--{name} {args.options[name]} is unknown; expected one of {', '.join(expected)}.")
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if args.device == "auto":
        args.device = next(name for name in available if available[name])
    elif not available[args.device]:
        raise UserError(f"--device {args.device} is not available here; use --device auto or cpu.")
    args.amp = args.device == "cuda" if args.amp is None else args.amp
    if args.repeat:
        torch.set_num_threads(args.threads)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    elif args.device == "cuda":
        torch.backends.cudnn.benchmark = True


def main(argv=None):
    """The command line; returns the exit code."""
    args = build_parser().parse_args(argv)
    args.command = " ".join(["python ldc.py", *(sys.argv[1:] if argv is None else argv)])
    from data import UserError
    try:
        resolve(args)
        if args.predict:
            if not args.run:
                raise UserError("--predict needs --run, the folder of a finished run.")
            for path, (name, similarity) in zip(args.predict, Classifier(args.run, args.row, args.device)(args.predict)):
                print(f"{path}: {name} (cosine similarity {similarity:.3f})")
            return 0
        import report
        results = [run_seed(args, seed) for seed in args.seed]
        print(report.run_table(results))
        if args.repeat:
            recorded = read_json(Path(args.repeat, "result.json"))["rows"]
            print(f"Largest difference of an accuracy from {args.repeat}: {largest_difference(results[0]['rows'], recorded):.2f} points.")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on after the last finished task.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
