/** What ComfyUI's settings dialog offers. The server reads the same ids from the user's settings. */

export const PROFILE = "HaloVAE.Profile";
export const HISTORY_SIZE = "HaloVAE.HistorySize";
export const PANEL = "HaloVAE.Panel";
export const UNITS = "HaloVAE.Units";

/**
 * The settings, as ComfyUI registers them.
 *
 * @param {object} listeners
 * @param {(isOn: boolean) => void} listeners.onPanel called with the present value too
 * @param {(units: string) => void} listeners.onUnits likewise
 * @returns {Record<string, any>[]}
 */
export function settings({ onPanel, onUnits }) {
  return [
    {
      id: UNITS,
      category: ["Halo VAE", "Display", "Units"],
      name: "Units of memory",
      tooltip: "In panels, in the history and in the nodes' text.",
      type: "combo",
      options: [{ text: "KiB, MiB, GiB", value: "binary" }, { text: "kB, MB, GB", value: "decimal" }],
      defaultValue: "binary",
      onChange: onUnits,
    },
    {
      id: PANEL,
      category: ["Halo VAE", "Display", "Panel"],
      name: "Panel on the nodes",
      tooltip: "Shows time, phases, memory and precision on each decode node, and the progress while it decodes.",
      type: "boolean",
      defaultValue: true,
      onChange: onPanel,
    },
    {
      id: HISTORY_SIZE,
      category: ["Halo VAE", "Profiler", "HistorySize"],
      name: "Size of the history (MiB)",
      tooltip: "The file of decodes is set aside at this size and a new one begun; the last ones set aside are kept.",
      type: "number",
      attrs: { min: 1, max: 4096, step: 1, showButtons: true },
      defaultValue: 16,
    },
    {
      id: PROFILE,
      category: ["Halo VAE", "Profiler", "Profile"],
      name: "What to record of each decode",
      tooltip: "From the next decode on. HALO_VAE_PROFILE, where it is set for the server, comes first.",
      type: "combo",
      options: [
        { text: "time only", value: "off" },
        { text: "summary", value: "summary" },
        { text: "summary and each op", value: "per_op" },
      ],
      defaultValue: "summary",
    },
  ];
}
