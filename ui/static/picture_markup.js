// What <beholder-picture> is made of.

export const MARKUP = `
  <div class="picture-page">
    <input class="picture-files unseen" id="picture-files" type="file" accept="image/*,video/*" multiple tabindex="-1"
      aria-hidden="true">
    <section class="picture-side" aria-label="Pictures and clips">
      <div class="notice bad picture-refused" role="alert" hidden><p></p>
        <button type="button" class="button quiet round" aria-label="Close">×</button></div>
      <div class="picture-empty">
        <h2>Show it something.</h2>
        <p>Drop pictures or a clip anywhere on this page, paste one, or choose files.</p>
        <button type="button" class="button primary picture-choose">Choose files</button>
        <p class="picture-promise">They are sent to this server only, and forgotten.</p>
      </div>
      <div class="picture-filled" hidden>
        <div class="picture-stage" role="group" aria-label="What is shown"></div>
        <div class="picture-bar">
          <div class="segments" role="radiogroup" aria-label="Whose view">
            <label><input type="radio" name="picture-view" value="own" checked>As you see it</label>
            <label><input type="radio" name="picture-view" value="seen">As the model sees it</label>
          </div>
          <label class="field picture-detail" hidden><span class="unseen">Detail</span>
            <select><option value="auto">detail: auto</option><option value="low">detail: low</option>
            <option value="high">detail: high</option></select></label>
        </div>
        <p class="picture-numbers"></p>
        <ul class="picture-strip" aria-label="All pictures and clips"></ul>
      </div>
    </section>
    <section class="picture-talk" aria-label="Conversation" hidden>
      <ol class="picture-turns" tabindex="0" aria-label="Questions and answers"></ol>
      <p class="unseen" aria-live="polite"></p>
      <form class="picture-ask">
        <div class="picture-questions" role="group" aria-label="Questions to ask"></div>
        <div class="picture-line">
          <label class="unseen" for="picture-question">Your question</label>
          <textarea id="picture-question" rows="1" dir="auto" placeholder="Ask about it"></textarea>
          <button class="button primary picture-send">Ask</button>
          <button type="button" class="button picture-stop" hidden>Stop</button>
        </div>
      </form>
      <button type="button" class="button quiet picture-new">Begin anew</button>
    </section>
    <p class="picture-dropping" aria-hidden="true">Drop it here</p>
  </div>`;
