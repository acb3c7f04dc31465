"""Beyond the paper, on torch and ldc.py alone: prototypes with an anchor, a whitened read-out, ADC.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from ldc import PrototypeStore, class_means, ldc_update, moved_by, ncm, to_float64

# ldc-anchor: LDC from a wider old space, [phi(x), f_{t-1}(x)], phi a fixed random function of the
# image. The class means of phi are taken while the images are there and stay exact for ever, so of
# what a prototype [phi-mean, P] is moved by only P is an estimate, and errors stop adding up. A
# relative: in retrieval, FCT (Ramanujan et al., CVPR 2022) keeps learnt side information per image.


def random_filters(count, channels, size, seed):
    """Filters (count, channels, size, size) of unit norm, the same ones on every device."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(count, channels, size, size, generator=generator)
    if channels == 3:  # blind to brightness
        weight = weight - weight.mean((1, 2, 3), keepdim=True)
    return weight / weight.flatten(1).norm(dim=1)[:, None, None, None]


def both_signs(x, threshold):
    """(N, c, H, W) -> (N, 2c, H, W): what exceeds the threshold, and what falls below minus it."""
    return torch.cat([(x - threshold).relu_(), (-threshold - x).relu_()], 1)


def at_most_32(x):
    """Images (N, 3, H, H), larger ones averaged down to 32 x 32."""
    if x.shape[-1] <= 32:
        return x
    where = x.cpu() if x.device.type == "mps" else x  # MPS pools by whole factors alone
    return F.adaptive_avg_pool2d(where, 32).to(x.device)


class Anchor(nn.Module):
    """phi: normalised images (N, 3, H, W), pooled to 32 x 32 if larger -> (N, dim)."""

    def __init__(self, first=128, second=256, groups=16):
        super().__init__()
        self.groups = groups  # a filter of the second layer sees one group of channels: cheaper
        self.dim = 4 * first + 2 * second
        weights = random_filters(first, 3, 5, 0), random_filters(second, 2 * first // groups, 3, 1)
        for name, weight in zip(("first", "second"), weights):
            self.register_buffer(name, weight, persistent=False)

    def forward(self, x):
        # layers of eight images stay in a core's cache: twice as fast there, the same numbers
        pieces = x.split(8) if x.device.type == "cpu" else [x]
        return torch.cat([self.random_layers(at_most_32(piece)) for piece in pieces])

    def random_layers(self, x):
        h = F.avg_pool2d(both_signs(F.conv2d(x, self.first, padding=2), 0.5), 2)
        h = h / (h.square().mean((1, 2, 3), keepdim=True).sqrt() + 1e-6)
        g = both_signs(F.conv2d(h, self.second, padding=1, groups=self.groups), 0.2)
        upper, lower = h.chunk(2, 2)  # a photograph has an up and a down: sky, ground
        return torch.cat([part.mean((2, 3)) for part in (upper, lower, g)], 1)


class Beside(nn.Module):
    """The wide space: images -> [phi(x), f(x)], (N, dim + d)."""

    def __init__(self, anchor, model):
        super().__init__()
        self.anchor = anchor
        self.model = model

    def forward(self, x):
        return torch.cat([self.anchor(x), self.model(x)], 1)


def anchored_update(prototypes, anchor, old_model, new_model, batches, ridge=1e-4):
    """ldc_update of [phi-mean, P] (C, dim + d), of which P moves and the anchor stays."""
    moved = ldc_update(prototypes, Beside(anchor, old_model), new_model, batches, solver="ridge",
                       ridge=ridge)
    return torch.cat([prototypes[:, :anchor.dim], moved], 1)


# lda: nearest mean after whitening with one covariance, which is moved like the prototypes.


def within_class_scatter(feats, labels, classes):
    """Sum of (f - mean)(f - mean)^T over all images, each around its class's mean: (d, d)."""
    classes = torch.as_tensor(list(classes), device=labels.device)
    position = (labels[:, None] == classes).to(torch.int64).argmax(1)  # classes in any order
    centred = to_float64(feats - class_means(feats, labels, classes)[position])
    return centred.T @ centred


@dataclass
class ScatterStore(PrototypeStore):
    """Prototypes, and one within-class scatter S pooled over all classes."""
    scatter: torch.Tensor | float = 0.0  # S, (d, d) in float64
    images: int = 0  # behind it

    def add(self, feats, labels, classes):
        """Append the means of new classes, and pool their scatter around these means."""
        super().add(feats, labels, classes)
        self.scatter = self.scatter + within_class_scatter(feats, labels, classes)
        self.images += len(feats)

    def move(self, update):
        """Move the prototypes, and S as a linear update x -> x M moves it: to M^T S M."""
        if self.means is not None:
            classes, d = self.means.shape
            moved = moved_by(update, torch.cat([self.means, torch.eye(d).to(self.means)]))
            self.means = moved[:classes]
            M = to_float64(moved[classes:])
            self.scatter = M.T @ self.scatter @ M

    def covariance(self):
        """Pooled within-class covariance, (d, d) in float64."""
        return self.scatter / self.images


def lda(feats, prototypes, covariance, shrink=1.0):
    """Ours: cosine NCM after whitening with one pooled covariance (d, d) -> class indices (N,)."""
    # clamped: one labelled image a class has no scatter, and this is plain NCM
    level = (shrink * covariance.diagonal().mean()).clamp(min=1e-6)
    eye = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    whiten = torch.linalg.inv(torch.linalg.cholesky(covariance + level * eye)).T.to(feats)
    return ncm(feats @ whiten, prototypes @ whiten)


# ADC: adversarial drift compensation (CVPR 2024), a rival that users expect.


def adc_update(prototypes, images, old_model, new_model, *, feats_old=None, alpha=25.0, steps=3,
               nearest=100, limits=None, batch_size=512):
    """ADC: perturb images until the old network takes them for an old class, use their drift.

    prototypes (C, d); images (N, 3, H, W), or what returns them when indexed; feats_old (N, d)
    their old features; limits: smallest and largest pixel; several classes share a batch.
    """
    with torch.no_grad():
        feats_old = old_model(images) if feats_old is None else feats_old
        distance = torch.cdist(prototypes, feats_old, compute_mode="donot_use_mm_for_euclid_dist")
    candidates = distance.topk(min(nearest, distance.shape[1]), largest=False).indices  # (C, m)
    low, high = limits or (images.min().item(), images.max().item())
    moved = []  # differs: the authors overwrite prototypes that later classes are compared with
    for index in torch.arange(len(prototypes)).split(max(1, batch_size // candidates.shape[1])):
        group = index.to(prototypes.device)
        clean = images[candidates[group].flatten()]  # (k m, 3, H, W)
        targets = prototypes[group]
        attacked = attack(clean, targets, old_model, alpha, steps, low, high)
        with torch.no_grad():
            taken_for = torch.cdist(old_model(attacked), prototypes).argmin(1).view(len(group), -1)
            found = taken_for == group[:, None]  # (k, m)
            success = found.any(1, keepdim=True)  # where no attack succeeds, clean images serve
            per_image = success.expand_as(found).reshape(-1, *[1] * (clean.ndim - 1))
            used = torch.where(per_image, attacked, clean)
            keep = torch.where(success, found, True).to(prototypes)
            drift = (new_model(used) - old_model(used)).reshape(*found.shape, -1)
            shift = (keep[:, None] @ drift).squeeze(1) / keep.sum(1, keepdim=True)
            moved.append(targets + shift)
    return torch.cat(moved)


def attack(images, prototypes, model, alpha, steps, low, high):
    """Steps of k m images towards the prototypes (k, d) of their k classes, within the pixel range.

    A step has length alpha over all images of a class.
    """
    k = len(prototypes)
    for _ in range(steps):
        images = images.detach().requires_grad_()
        with torch.enable_grad():
            difference = model(images).view(k, -1, prototypes.shape[1]) - prototypes[:, None]
            loss = difference.square().mean((1, 2)).sum()  # classes do not touch each other
            gradient, = torch.autograd.grad(loss, images)
        per_class = len(images) // k
        length = torch.stack([part.norm() for part in gradient.split(per_class)]).clamp(min=1e-12)
        length = length.repeat_interleave(per_class).view(-1, *[1] * (images.ndim - 1))
        images = (images - alpha * gradient / length).clamp(low, high).detach()
    return images
