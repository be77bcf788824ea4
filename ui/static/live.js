class Live extends HTMLElement {
  connectedCallback() {
    this.textContent = "Live";
  }
}

customElements.define("beholder-live", Live);
