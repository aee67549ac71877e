"""Triton kernels of the stacked engine, for float32 on CUDA.

A convolution is a matrix product whose operands are gathered from the images while it runs (an
implicit GEMM), so no patches are written and a step reads and writes activations once. A program
holds the four pixels of its 2×2 cells in four accumulators, so that pooling happens in registers.
A pooled cell passes its gradient to one pixel, which its code names: the weight gradient unpools
while it reads.

Dense layers of small batches are as fast as their weights can be read. A whole training step of a
small model of dense layers is one kernel.

A convolution's weight is packed as [T·T·I, O], row tap by tap and then column. Shapes: as in
`fedproto.engines.stacking.formulas`.
"""

# Triton reads the functions itself: arguments have no Python types, and constants are upper case.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, N803, N806

from __future__ import annotations

import triton
import triton.language as tl

DEAD = tl.constexpr(4)


@triton.jit
def _cells(cell, rows, columns):
    """The image and the upper left pixel of 2×2 cells."""
    index = cell % (rows * columns)
    return cell // (rows * columns), index // columns * 2, index % columns * 2


@triton.jit
def _inside(live, row, column, height, width):
    return live & (row >= 0) & (row < height) & (column >= 0) & (column < width)


@triton.jit
def _pixels(x, live, image, row, column, height, width, CHANNELS: tl.constexpr):
    """All channels of some pixels, ``[BLOCK, CHANNELS]``; 0 outside of the image."""
    inside = _inside(live, row, column, height, width)
    at = ((image * height + row) * width + column) * CHANNELS
    channel = tl.arange(0, CHANNELS)
    return tl.load(x + at[:, None] + channel[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _operand(
    x, live, image, row, column, tap, height, width, INS: tl.constexpr, TAPS: tl.constexpr,
    PATCH: tl.constexpr,
):  # fmt: skip
    """Inputs around some pixels: at one tap ``[BLOCK, INS]``, or at all taps ``[BLOCK, PATCH]``."""
    if PATCH:
        number = tl.arange(0, PATCH)
        tap_of = number // INS
        down = row[:, None] + (tap_of // TAPS - TAPS // 2)[None, :]
        across = column[:, None] + (tap_of % TAPS - TAPS // 2)[None, :]
        exists = live[:, None] & (number < TAPS * TAPS * INS)[None, :]
        inside = _inside(exists, down, across, height, width)
        at = ((image[:, None] * height + down) * width + across) * INS + (number % INS)[None, :]
        value = tl.load(x + at, mask=inside, other=0.0)
    else:
        down = row + tap // TAPS - TAPS // 2
        across = column + tap % TAPS - TAPS // 2
        value = _pixels(x, live, image, down, across, height, width, INS)
    return value


@triton.jit
def _weight(
    weight, tap, INS: tl.constexpr, OUTS: tl.constexpr, TAPS: tl.constexpr, PATCH: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """The weight for `_operand`; for the gradient of an input, that of the opposite tap."""
    outs = tl.arange(0, OUTS)
    if PATCH:
        number = tl.arange(0, PATCH)
        exists = (number < TAPS * TAPS * INS)[:, None]
        at = number[:, None] * OUTS + outs[None, :]
        value = tl.load(weight + at, mask=exists, other=0.0)
    elif BACKWARD:
        ins = tl.arange(0, INS)
        first = (TAPS * TAPS - 1 - tap) * (INS * OUTS)
        value = tl.load(weight + first + ins[None, :] * OUTS + outs[:, None])
    else:
        ins = tl.arange(0, INS)
        value = tl.load(weight + tap * (INS * OUTS) + ins[:, None] * OUTS + outs[None, :])
    return value


@triton.jit
def convolve(
    x, weight, bias, y, code, x_row, weight_row, bias_row, y_row, count, rows, columns, height,
    width, INS: tl.constexpr, OUTS: tl.constexpr, TAPS: tl.constexpr, PATCH: tl.constexpr,
    BLOCK: tl.constexpr, POOLED: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A convolution with its bias, then perhaps pooling and ReLU; or the gradient of its input.

    Goes over the taps; inputs of few channels are read as whole patches instead. Backward, `x` is
    the gradient of the output and `y` that of the input: ``dx[h] = Σ_t dz[h − t + T//2] wₜ``.
    """
    READ: tl.constexpr = OUTS if BACKWARD else INS
    WRITTEN: tl.constexpr = INS if BACKWARD else OUTS
    STEPS: tl.constexpr = 1 if PATCH else TAPS * TAPS
    job = tl.program_id(1).to(tl.int64)
    x += job * x_row
    weight += job * weight_row
    y += job * y_row
    code += job * y_row
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = cell < count
    image, row, column = _cells(cell, rows, columns)
    a = tl.zeros((BLOCK, WRITTEN), tl.float32)
    b = tl.zeros((BLOCK, WRITTEN), tl.float32)
    c = tl.zeros((BLOCK, WRITTEN), tl.float32)
    d = tl.zeros((BLOCK, WRITTEN), tl.float32)
    for tap in range(STEPS):
        w = _weight(weight, tap, INS, OUTS, TAPS, PATCH, BACKWARD)
        p = _operand(x, live, image, row, column, tap, height, width, READ, TAPS, PATCH)
        a = tl.dot(p, w, a, input_precision=PRECISION)
        p = _operand(x, live, image, row, column + 1, tap, height, width, READ, TAPS, PATCH)
        b = tl.dot(p, w, b, input_precision=PRECISION)
        p = _operand(x, live, image, row + 1, column, tap, height, width, READ, TAPS, PATCH)
        c = tl.dot(p, w, c, input_precision=PRECISION)
        p = _operand(x, live, image, row + 1, column + 1, tap, height, width, READ, TAPS, PATCH)
        d = tl.dot(p, w, d, input_precision=PRECISION)
    channel = tl.arange(0, WRITTEN)
    if BACKWARD:
        shift = tl.zeros((WRITTEN,), tl.float32)
    else:
        shift = tl.load(bias + job * bias_row + channel)
    if POOLED:
        top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
        first = tl.where(a == top, 0, tl.where(b == top, 1, tl.where(c == top, 2, 3)))
        top += shift[None, :]
        at = ((image * (height // 2) + row // 2) * (width // 2) + column // 2) * WRITTEN
        where = at[:, None] + channel[None, :]
        tl.store(y + where, tl.maximum(top, 0.0), mask=live[:, None])
        passed = tl.where(top > 0, first, DEAD).to(tl.uint8)
        tl.store(code + where, passed, mask=live[:, None])
    else:
        for index in tl.static_range(4):
            down = row + index // 2
            across = column + index % 2
            at = ((image * height + down) * width + across) * WRITTEN
            inside = _inside(live, down, across, height, width)
            z = (a if index == 0 else b if index == 1 else c if index == 2 else d) + shift[None, :]
            tl.store(y + at[:, None] + channel[None, :], z, mask=inside[:, None])


@triton.jit
def weight_gradient(
    x, dy, code, out, x_row, dy_row, out_row, count, rows, columns, height, width, part,
    INS: tl.constexpr, OUTS: tl.constexpr, TAPS: tl.constexpr, PATCH: tl.constexpr,
    BLOCK: tl.constexpr, POOLED: tl.constexpr, SUBTRACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``dwₜ = Σ_h x[h + t − T//2]ᵀ dz[h]``, or ``w −= dw``.

    A program sums over all cells for one tap; or, where patches are read, over one part of the
    cells for all taps.
    """
    WIDTH: tl.constexpr = PATCH if PATCH else INS
    job = tl.program_id(1).to(tl.int64)
    x += job * x_row
    dy += job * dy_row
    code += job * dy_row
    outs = tl.arange(0, OUTS)
    total = tl.zeros((WIDTH, OUTS), tl.float32)
    tap = tl.program_id(0)
    begin = tl.program_id(0) * part if PATCH else 0
    end = tl.minimum(begin + part, count)
    for turn in range(0, part, BLOCK):
        cell = begin + turn + tl.arange(0, BLOCK)
        live = cell < end
        image, row, column = _cells(cell, rows, columns)
        if POOLED:
            where = cell[:, None] * OUTS + outs[None, :]
            passed = tl.load(code + where, mask=live[:, None], other=DEAD)
            value = tl.load(dy + where, mask=live[:, None], other=0.0)
        for pixel in tl.static_range(4):
            down = row + pixel // 2
            across = column + pixel % 2
            if POOLED:
                g = tl.where(passed == pixel, value, 0.0)
            else:
                g = _pixels(dy, live, image, down, across, height, width, OUTS)
            p = _operand(x, live, image, down, across, tap, height, width, INS, TAPS, PATCH)
            total = tl.dot(tl.trans(p), g, total, input_precision=PRECISION)
    number = tl.arange(0, WIDTH)
    tile = number[:, None] * OUTS + outs[None, :]
    if PATCH:
        out += (job * tl.num_programs(0) + tl.program_id(0)) * out_row
        tl.store(out + tile, total, mask=(number < TAPS * TAPS * INS)[:, None])
    else:
        out += job * out_row + tap * (INS * OUTS)
        if SUBTRACT:
            total = tl.load(out + tile) - total
        tl.store(out + tile, total)


@triton.jit
def _matrix(x, i, j, rows, columns, row_size, column_size):
    """Elements ``[i, j]`` of a matrix, 0 outside; where they lie, and which exist."""
    where = i[:, None] * row_size + j[None, :] * column_size
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    return tl.load(x + where, mask=inside, other=0.0), where, inside


@triton.jit
def dense_forward(
    x, weight, bias, y, x_row, weight_row, bias_row, y_row, batch, inputs, units,
    BATCH: tl.constexpr, UNITS: tl.constexpr, STRIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``y = x wᵀ + b`` with ReLU, a few units per program: the weight is read once."""
    job = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    sample = tl.arange(0, BATCH)
    weight += job * weight_row
    x += job * x_row
    total = tl.zeros((UNITS, BATCH), tl.float32)
    for first in range(0, inputs, STRIP):
        number = first + tl.arange(0, STRIP)
        w, _, _ = _matrix(weight, unit, number, units, inputs, inputs, 1)
        p, _, _ = _matrix(x, number, sample, inputs, batch, 1, inputs)
        total = tl.dot(w, p, total, input_precision=PRECISION)
    total += tl.load(bias + job * bias_row + unit, mask=unit < units, other=0.0)[:, None]
    where = y + job * y_row + sample[None, :] * units + unit[:, None]
    inside = (sample < batch)[None, :] & (unit < units)[:, None]
    tl.store(where, tl.maximum(total, 0.0), mask=inside)


@triton.jit
def dense_input_gradient(
    dz, weight, dx, dz_row, weight_row, dx_row, batch, inputs, units,
    BATCH: tl.constexpr, UNITS: tl.constexpr, STRIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``dx = dz w``, a strip of inputs per program."""
    job = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    sample = tl.arange(0, BATCH)
    weight += job * weight_row
    dz += job * dz_row
    total = tl.zeros((BATCH, STRIP), tl.float32)
    for first in range(0, units, UNITS):
        unit = first + tl.arange(0, UNITS)
        w, _, _ = _matrix(weight, unit, number, units, inputs, inputs, 1)
        g, _, _ = _matrix(dz, sample, unit, batch, units, units, 1)
        total = tl.dot(g, w, total, input_precision=PRECISION)
    where = dx + job * dx_row + sample[:, None] * inputs + number[None, :]
    tl.store(where, total, mask=(sample < batch)[:, None] & (number < inputs)[None, :])


@triton.jit
def dense_descent(
    dz, x, weight, dz_row, x_row, weight_row, batch, inputs, units,
    BATCH: tl.constexpr, UNITS: tl.constexpr, STRIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``w −= dzᵀ x`` of a tile of the weight per program."""
    job = tl.program_id(2).to(tl.int64)
    number = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    sample = tl.arange(0, BATCH)
    weight += job * weight_row
    w, where, inside = _matrix(weight, unit, number, units, inputs, inputs, 1)
    g, _, _ = _matrix(dz + job * dz_row, unit, sample, units, batch, 1, units)
    p, _, _ = _matrix(x + job * x_row, sample, number, batch, inputs, inputs, 1)
    tl.store(weight + where, w - tl.dot(g, p, input_precision=PRECISION), mask=inside)


@triton.jit
def _move(rows, received, where, inside, value, change, pull, PROXIMAL: tl.constexpr):
    """Gradient descent, with a pull to the received weights."""
    if PROXIMAL:
        value += pull * (tl.load(received + where, mask=inside, other=0.0) - value)
    tl.store(rows + where, value - change, mask=inside)


@triton.jit
def mlp_step(
    inputs, targets, samples, rows, received, start, steps, last_epoch, rate, proximal, count, loss,
    row_size, table, batch, channels, hidden, features, classes, weight1, bias1, weight2, bias2,
    weight3, bias3, BATCH: tl.constexpr, IN: tl.constexpr, HIDDEN: tl.constexpr,
    CHUNK: tl.constexpr, CLASSES: tl.constexpr, PROXIMAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A local step of a model of two dense layers and a head, one job per program.

    The second layer is computed in chunks of its units, forward and then again backward, where
    each chunk is updated as soon as it has been used. Weights are read transposed.
    """
    job = tl.program_id(0).to(tl.int64)
    number = tl.load(count)
    busy = number < tl.load(steps + job)
    pace = tl.where(busy, tl.load(rate + job), 0.0)
    pull = pace * tl.load(proximal + job)
    sample = tl.arange(0, BATCH)
    at = tl.minimum(tl.load(start + job) + number * batch + sample, table - 1)
    index = tl.load(samples + at, mask=sample < batch, other=-1)
    live = tl.where(busy, index, -1) >= 0
    index = tl.where(live, index, 0)
    share = tl.where(live, pace / tl.maximum(tl.sum(live.to(tl.int32), axis=0), 1), 0.0)
    channel = tl.arange(0, IN)
    x = tl.load(
        inputs + index[:, None] * channels + channel[None, :],
        mask=live[:, None] & (channel < channels)[None, :],
        other=0.0,
    )
    label = tl.load(targets + index, mask=live, other=0)
    rows += job * row_size
    received += job * row_size

    unit = tl.arange(0, HIDDEN)
    kind = tl.arange(0, CLASSES)
    w1, _, _ = _matrix(rows + weight1, channel, unit, channels, hidden, 1, channels)
    b1 = tl.load(rows + bias1 + unit, mask=unit < hidden, other=0.0)
    h1 = tl.maximum(tl.dot(x, w1, input_precision=PRECISION) + b1[None, :], 0.0)
    b3 = tl.load(rows + bias3 + kind, mask=kind < classes, other=0.0)
    z = tl.zeros((BATCH, CLASSES), tl.float32) + b3[None, :]
    for first in range(0, features, CHUNK):
        part = first + tl.arange(0, CHUNK)
        w2, _, _ = _matrix(rows + weight2, unit, part, hidden, features, 1, hidden)
        w3, _, _ = _matrix(rows + weight3, part, kind, features, classes, 1, features)
        b2 = tl.load(rows + bias2 + part, mask=part < features, other=0.0)
        h2 = tl.maximum(tl.dot(h1, w2, input_precision=PRECISION) + b2[None, :], 0.0)
        z = tl.dot(h2, w3, z, input_precision=PRECISION)

    z = tl.where((kind < classes)[None, :], z, float("-inf"))
    z -= tl.max(z, axis=1)[:, None]
    total = tl.sum(tl.exp(z), axis=1)
    hit = kind[None, :] == label[:, None]
    each = tl.log(total) - tl.sum(tl.where(hit, z, 0.0), axis=1)
    counts = live & (number >= tl.load(last_epoch + job))
    tl.store(loss + job, tl.load(loss + job) + tl.sum(tl.where(counts, each, 0.0), axis=0))
    dz = (tl.exp(z) / total[:, None] - hit.to(tl.float32)) * share[:, None]

    d1 = tl.zeros((BATCH, HIDDEN), tl.float32)
    for first in range(0, features, CHUNK):
        part = first + tl.arange(0, CHUNK)
        w2, at2, in2 = _matrix(rows + weight2, unit, part, hidden, features, 1, hidden)
        w3, at3, in3 = _matrix(rows + weight3, part, kind, features, classes, 1, features)
        b2 = tl.load(rows + bias2 + part, mask=part < features, other=0.0)
        h2 = tl.maximum(tl.dot(h1, w2, input_precision=PRECISION) + b2[None, :], 0.0)
        d2 = tl.where(h2 > 0, tl.dot(dz, tl.trans(w3), input_precision=PRECISION), 0.0)
        d1 = tl.dot(d2, tl.trans(w2), d1, input_precision=PRECISION)
        dw3 = tl.dot(tl.trans(h2), dz, input_precision=PRECISION)
        dw2 = tl.dot(tl.trans(h1), d2, input_precision=PRECISION)
        _move(rows, received, weight3 + at3, in3, w3, dw3, pull, PROXIMAL)
        _move(rows, received, weight2 + at2, in2, w2, dw2, pull, PROXIMAL)
        db2 = tl.sum(d2, axis=0)
        _move(rows, received, bias2 + part, part < features, b2, db2, pull, PROXIMAL)
    d1 = tl.where(h1 > 0, d1, 0.0)
    dw1 = tl.dot(tl.trans(x), d1, input_precision=PRECISION)
    # Read again: kept, it would take up the registers all the time.
    w1, at1, in1 = _matrix(rows + weight1, channel, unit, channels, hidden, 1, channels)
    _move(rows, received, weight1 + at1, in1, w1, dw1, pull, PROXIMAL)
    db1 = tl.sum(d1, axis=0)
    _move(rows, received, bias1 + unit, unit < hidden, b1, db1, pull, PROXIMAL)
    db3 = tl.sum(dz, axis=0)
    _move(rows, received, bias3 + kind, kind < classes, b3, db3, pull, PROXIMAL)
