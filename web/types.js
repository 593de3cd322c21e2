/**
 * The JSON that the server sends, for type checkers and readers. No code.
 *
 * Times are nanoseconds (`_ns`), sizes bytes (`_bytes`); null is unknown, zero is measured.
 *
 * @typedef {"ok" | "interrupted" | "out_of_memory" | "non_finite" | "error"} Status
 *
 * @typedef {object} Reading one memory counter over one decode
 * @property {number | null} start_bytes
 * @property {number | null} peak_bytes
 * @property {number | null} above_start_bytes
 * @property {boolean} since_process_start
 *
 * @typedef {object} DecodeRecord what one decode did and cost; parts are null at profile level "off"
 * @property {Status} status
 * @property {string | null} error
 * @property {number[] | null} image_shape
 * @property {string} started_at
 * @property {number} wall_ns
 * @property {boolean | null} first_of_shape
 * @property {string} level
 * @property {string} [record_id]
 * @property {{vae_hash: string | null, family: string, loaded_dtype: string, device: string}} identity
 * @property {Record<string, any>} environment
 * @property {string} environment_id
 * @property {{settings: Record<string, any>, latent_shape: number[], latent_dtype: string}} request
 * @property {Record<string, any> | null} plan
 * @property {Record<string, number> | null} phases
 * @property {Stage[]} [stages]
 * @property {{planned: Record<string, number> | null, allocated: Reading, reserved: Reading, process: Reading,
 *   available_bytes: number | null} | null} memory
 * @property {Record<string, any> | null} pool
 * @property {{name: string, lookups: number, hits: number}[] | null} caches
 * @property {{kept: Macs[], redone: Macs[], ops_below_native: number, converted_bytes: number} | null} precision
 * @property {Record<string, any> | null} batch
 * @property {{asked: number, ready: number} | null} prefetch
 * @property {{count: number, distinct_shapes: number, shapes: any[], grid: number[] | null} | null} tiles
 * @property {{requests: number, distinct: number, new: number, shapes: any[]} | null} convs
 * @property {number | null} n_fallbacks
 * @property {{kind: string, where: string, given: string, used: string, reason: string}[]} fallbacks
 * @property {{frame: number, smoothness: number, clip: number}[]} boundaries
 * @property {number | null} [n_boundaries]
 * @property {number | null} [n_stages]
 * @property {number | null} cpu_time_ns
 * @property {number | null} energy_uj
 *
 * @typedef {{dtype: string, macs: number}} Macs
 *
 * @typedef {object} Stage one run of one op
 * @property {string} op
 * @property {string} kind
 * @property {number} n_tiles
 * @property {number} start_ns
 * @property {number} host_ns
 * @property {number | null} device_ns
 * @property {number} macs
 * @property {string} dtype
 * @property {string} backend
 * @property {number | null} memory_bytes
 *
 * @typedef {object} Summary figures that follow from a record
 * @property {number | null} used_bytes
 * @property {number | null} prediction_ratio
 * @property {number | null} conversion_share
 * @property {number | null} bytes_per_s
 * @property {number | null} bandwidth_share
 * @property {number | null} parallel_efficiency
 * @property {number | null} temporal_consistency
 * @property {number | null} fragmentation_bytes
 * @property {number | null} free_bytes
 * @property {number | null} cache_hit_rate
 * @property {Record<string, number | null>} cache_hit_rates
 * @property {number | null} pool_hit_rate
 * @property {Record<string, number> | null} mac_shares by "fp16", "bf16", "fp32"
 *
 * @typedef {{record_id: string, wall_ns: number, status: Status, cold: boolean | null, same: boolean}} Recent
 *
 * @typedef {object} PanelData what a node's panel shows
 * @property {number} schema_version
 * @property {string} record_id
 * @property {DecodeRecord} record without its stages
 * @property {Summary} summary
 * @property {Recent[]} recent newest last
 * @property {number | null} median_ns
 * @property {number} n_median
 *
 * @typedef {object} Progress where a running decode stands
 * @property {string} node
 * @property {string | null} prompt_id
 * @property {string} stage
 * @property {string} phase
 * @property {[number, number] | null} chunk
 * @property {[number, number, string] | null} op
 * @property {[number, number] | null} tile
 * @property {number} done
 * @property {number | null} total
 * @property {number} elapsed_ns
 * @property {number | null} memory_bytes
 * @property {number | null} work_per_s units of `done`
 *
 * @typedef {object} HistoryRow
 * @property {string} record_id
 * @property {string} started_at
 * @property {Status} status
 * @property {string | null} error
 * @property {string} family
 * @property {string | null} vae_hash
 * @property {string} device
 * @property {string | null} method
 * @property {string | null} precision
 * @property {number[]} latent_shape
 * @property {number[] | null} image_shape
 * @property {number} wall_ns
 * @property {boolean | null} first_of_shape
 * @property {number | null} predicted_bytes
 * @property {number | null} used_bytes what the prediction compares with
 * @property {number | null} n_tiles
 * @property {number | null} n_fallbacks
 * @property {number | null} temporal_consistency
 * @property {string} level
 *
 * @typedef {{rows: HistoryRow[], next: string | null, skipped: number, problems: string[]}} HistoryPage
 */

export {};
