/** Stand-in for ComfyUI's api: its fetch, and events that a test sends by hand. */

class Api extends EventTarget {
  /** Every request, as "METHOD path". @type {string[]} */
  asked = [];
  /** Types of events that nobody listens to. @type {string[]} */
  unheard = [];
  #heard = new Set();

  addEventListener(type, listener, options) {
    this.#heard.add(type);
    super.addEventListener(type, listener, options);
  }

  fetchApi(path, options = {}) {
    this.asked.push(`${options.method ?? "GET"} ${path}`);
    return fetch(`/api${path}`, options);
  }

  apiURL(path) {
    return `/api${path}`;
  }

  /** Send an event as the server would. */
  send(type, detail) {
    if (!this.#heard.has(type)) this.unheard.push(type);
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

export const api = new Api();
