class Picture extends HTMLElement {
  connectedCallback() {
    this.textContent = "Picture";
  }
}

customElements.define("beholder-picture", Picture);
