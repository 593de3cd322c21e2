/** Makers of DOM and SVG elements. Text is only ever set as text, so markup in a name stays what it is: text. */

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";

/**
 * @typedef {Node | string | number | null | undefined | false} Leaf
 * @typedef {Leaf | any[]} Child an array holds more of them, to any depth
 * @typedef {Record<string, any>} Attributes `class`, `aria-*`, …; `style` is an object of CSS properties, `on` one of
 *   listeners by event; null, undefined and false leave an attribute out, true sets it empty
 */

/**
 * @param {string} tag
 * @param {Attributes} [attributes]
 * @param {...Child} children
 * @returns {HTMLElement}
 */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/**
 * @param {string} tag
 * @param {Attributes} [attributes]
 * @param {...Child} children
 * @returns {SVGElement}
 */
export function svg(tag, attributes = {}, ...children) {
  return filled(/** @type {SVGElement} */ (document.createElementNS(SVG_NAMESPACE, tag)), attributes, children);
}

/**
 * A real button that does `action` when it is pressed.
 *
 * @param {string} label
 * @param {() => void} action
 * @param {Attributes} [attributes]
 * @returns {HTMLButtonElement}
 */
export function button(label, action, attributes = {}) {
  const made = element("button", { type: "button", class: "halo-vae-button", ...attributes, on: { click: action } }, label);
  return /** @type {HTMLButtonElement} */ (made);
}

/**
 * Put these children in place of those that are there.
 *
 * @template {Element} T
 * @param {T} parent
 * @param {...Child} children
 * @returns {T}
 */
export function fill(parent, ...children) {
  parent.replaceChildren(...nodes(children));
  return parent;
}

/**
 * Set a text where it differs: an unchanged text costs no layout.
 *
 * @param {Element} target
 * @param {string} text
 */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/**
 * @template {HTMLElement | SVGElement} T
 * @param {T} made
 * @param {Attributes} attributes
 * @param {Child[]} children
 * @returns {T}
 */
function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") {
      for (const [property, setting] of Object.entries(value)) made.style.setProperty(property, String(setting));
    } else if (name === "on") {
      for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    } else {
      made.setAttribute(name, value === true ? "" : String(value));
    }
  }
  made.append(...nodes(children));
  return made;
}

/**
 * @param {Child} child
 * @returns {(Node | string)[]}
 */
function nodes(child) {
  if (Array.isArray(child)) return child.flatMap(nodes);
  if (child === null || child === undefined || child === false) return [];
  return [child instanceof Node ? child : String(child)];
}
