class Header extends HTMLElement {
  connectedCallback() {
    this.innerHTML = `<h1>Beholder</h1>`;
  }
}

customElements.define("beholder-header", Header);
