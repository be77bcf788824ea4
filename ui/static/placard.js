class Placard extends HTMLElement {
  connectedCallback() {
    this.textContent = "Placard";
  }
}

customElements.define("beholder-placard", Placard);
