// The head of the page: name, model, how the server is, light or dark. Says when the server is gone and when it is back.

import { address, get } from "./api.js";
import { icon } from "./icons.js";
import { showShortcuts } from "./shortcuts.js";

const LOOK_EVERY_MS = 10_000;
const PATIENCE_MS = 8000; // one that hangs is as good as none
const LOOK_AGAIN_MS = 1000; // while it is gone
const NEXT = { auto: "light", light: "dark", dark: "auto" };
const SAYS = { auto: "as the system", light: "light", dark: "dark" };
const ICONS = {
  auto: '<circle cx="10" cy="10" r="6.5"/><path d="M10 3.5a6.5 6.5 0 0 1 0 13z" fill="currentColor"/>',
  light: '<circle cx="10" cy="10" r="3.4"/><path d="M10 1.8v2M10 16.2v2M1.8 10h2M16.2 10h2M4.2 4.2l1.4 1.4M14.4 14.4l1.4 1.4M4.2 15.8l1.4-1.4M14.4 5.6l1.4-1.4"/>',
  dark: '<path d="M16.5 12.2A7 7 0 0 1 7.8 3.5a7 7 0 1 0 8.7 8.7z"/>',
};

class Header extends HTMLElement {
  #timer = null;
  #model = "";

  connectedCallback() {
    this.innerHTML = `
      <div class="head">
        <div class="head-name"><img src="${new URL("icon.svg", import.meta.url)}" alt="" width="28" height="28">
          <h1>Beholder</h1></div>
        <p class="head-watching" role="status" hidden></p>
        <p class="head-state" role="status"><span class="head-dot"></span><span class="head-words"></span></p>
        <button type="button" class="button quiet round head-keys" aria-label="Keys (?)" title="Keys (?)">${icon("keys")}</button>
        <button type="button" class="button quiet round head-look"></button>
      </div>
      <p class="head-gone" role="alert" hidden></p>`;
    this.querySelector(".head-look").addEventListener("click", () => {
      beholderAppearance.set(NEXT[beholderAppearance.get()]);
      this.#showAppearance();
    });
    this.querySelector(".head-keys").addEventListener("click", showShortcuts);
    this.#showAppearance();
    this.#look();
    document.addEventListener("visibilitychange", this.#onShown);
    document.addEventListener("beholder:watching", this.#onWatching);
  }

  disconnectedCallback() {
    clearTimeout(this.#timer);
    document.removeEventListener("visibilitychange", this.#onShown);
    document.removeEventListener("beholder:watching", this.#onWatching);
  }

  #onWatching = ({ detail }) => {
    const place = this.querySelector(".head-watching");
    place.hidden = !detail;
    place.textContent = detail;
  };

  #onShown = () => {
    if (!document.hidden) this.#look();
  };

  #showAppearance() {
    const choice = beholderAppearance.get();
    const button = this.querySelector(".head-look");
    button.innerHTML = `<svg viewBox="0 0 20 20" fill="none" stroke="currentColor" stroke-width="1.5"
      stroke-linecap="round" aria-hidden="true">${ICONS[choice]}</svg>`;
    button.setAttribute("aria-label", `Appearance: ${SAYS[choice]}`);
    button.title = button.getAttribute("aria-label");
  }

  async #look() {
    clearTimeout(this.#timer);
    if (document.hidden) return;
    const state = await this.#state();
    if (state === "ready" && !this.#model) {
      this.#model = await get("/v1/models").then(
        ({ data }) => data[0].id,
        () => "",
      );
    }
    this.dataset.state = state;
    this.querySelector(".head-words").textContent = state === "ready" ? this.#model || "ready" : state;
    const gone = this.querySelector(".head-gone");
    gone.hidden = state === "ready";
    gone.textContent =
      state === "away"
        ? "The server does not answer; it may be restarting. This page goes on by itself when it is back."
        : state === "starting"
          ? "The server is starting. This page goes on by itself when it is ready."
          : state === "draining"
            ? "The server is shutting down."
            : "";
    this.#timer = setTimeout(() => this.#look(), state === "ready" ? LOOK_EVERY_MS : LOOK_AGAIN_MS);
  }

  async #state() {
    try {
      const response = await fetch(address("/ready"), { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
      return (await response.json()).status;
    } catch {
      return "away";
    }
  }
}

customElements.define("beholder-header", Header);
