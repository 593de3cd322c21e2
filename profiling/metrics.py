"""The eleven aggregate metrics over ok decodes, and the counts beside them. No denominator gives None."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .parts import DecodeStatus, share
from .record import DecodeRecord

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Aggregate of ok decodes; failed and cancelled ones are only counted. Totals never fall."""

    average_execution_time: float | None
    """Mean wall time in seconds, the device synchronised at both ends."""
    total_executions: int
    """Decodes that ended well."""
    cache_hit_rate: float | None
    """Hits ÷ lookups over program, plan, packed-weight and tuning caches."""
    memory_efficiency: float | None
    """Bytes served from pooled buffers ÷ bytes requested."""
    precision_efficiency: float | None
    """Multiply-accumulates below fp32 that were kept ÷ all that were done below fp32."""
    batch_efficiency: float | None
    """Images decoded ÷ image slots of the passes that ran."""
    prefetch_efficiency: float | None
    """Prefetched items ready when asked for ÷ prefetched items."""
    total_memory_saves: int
    """Allocations avoided by the pool."""
    total_precision_optimizations: int
    """Op runs below the decoder's own dtype that were kept."""
    total_batch_optimizations: int
    """Decodes in which a pass held more than one image."""
    total_prefetch_hits: int
    """Prefetched items ready when asked for."""
    first_of_shape_executions: int
    """Ok decodes that requested a convolution shape new to the process."""
    average_execution_time_first_of_shape: float | None
    """Their mean wall time in seconds: may hold kernel searches."""
    average_execution_time_repeated: float | None
    """Mean wall time in seconds of the ok decodes that requested none."""
    interrupted_executions: int
    failed_executions: int
    """Out of memory, not finite, or any other error."""


class MetricsTotals:
    """Running sums; `add` each record once."""

    def __init__(self) -> None:
        """Nothing recorded."""
        self._n = self._interrupted = self._failed = 0
        self._wall_ns = self._first_ns = self._repeated_ns = self._n_first = self._n_repeated = 0
        self._lookups = self._cache_hits = 0
        self._requested_bytes = self._served_bytes = self._pool_hits = 0
        self._narrow_kept = self._narrow_redone = self._below_native = 0
        self._images = self._slots = self._multi = 0
        self._asked = self._ready = 0

    def add(self, record: DecodeRecord) -> None:
        """Count one decode; parts that were not recorded add nothing."""
        if record.status is not DecodeStatus.OK:
            interrupted = record.status is DecodeStatus.INTERRUPTED
            self._interrupted += interrupted
            self._failed += not interrupted
            return
        self._n += 1
        self._wall_ns += record.wall_ns
        if record.first_of_shape is True:
            self._n_first += 1
            self._first_ns += record.wall_ns
        elif record.first_of_shape is False:
            self._n_repeated += 1
            self._repeated_ns += record.wall_ns
        self._add_parts(record)

    def _add_parts(self, record: DecodeRecord) -> None:
        for cache in record.caches or ():
            self._lookups += cache.lookups
            self._cache_hits += cache.hits
        if record.pool is not None:
            self._requested_bytes += record.pool.requested_bytes
            self._served_bytes += record.pool.served_bytes
            self._pool_hits += record.pool.hits
        if record.precision is not None:
            self._narrow_kept += record.precision.kept_narrow_macs
            self._narrow_redone += record.precision.redone_narrow_macs
            self._below_native += record.precision.ops_below_native
        if record.batch is not None:
            self._images += record.batch.images
            self._slots += record.batch.slots
            self._multi += record.batch.largest_pass > 1
        if record.prefetch is not None:
            self._asked += record.prefetch.asked
            self._ready += record.prefetch.ready

    def metrics(self) -> Metrics:
        """The aggregate so far."""
        return Metrics(
            average_execution_time=share(self._wall_ns, self._n * _NS),
            total_executions=self._n,
            cache_hit_rate=share(self._cache_hits, self._lookups),
            memory_efficiency=share(self._served_bytes, self._requested_bytes),
            precision_efficiency=share(self._narrow_kept, self._narrow_kept + self._narrow_redone),
            batch_efficiency=share(self._images, self._slots),
            prefetch_efficiency=share(self._ready, self._asked),
            total_memory_saves=self._pool_hits,
            total_precision_optimizations=self._below_native,
            total_batch_optimizations=self._multi,
            total_prefetch_hits=self._ready,
            first_of_shape_executions=self._n_first,
            average_execution_time_first_of_shape=share(self._first_ns, self._n_first * _NS),
            average_execution_time_repeated=share(self._repeated_ns, self._n_repeated * _NS),
            interrupted_executions=self._interrupted,
            failed_executions=self._failed,
        )


def metrics_of(records: Iterable[DecodeRecord]) -> Metrics:
    """The aggregate of given records, e.g. of a history."""
    totals = MetricsTotals()
    for record in records:
        totals.add(record)
    return totals.metrics()
