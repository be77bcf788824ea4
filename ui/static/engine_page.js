class Engine extends HTMLElement {
  connectedCallback() {
    this.textContent = "Engine";
  }
}

customElements.define("beholder-engine", Engine);
