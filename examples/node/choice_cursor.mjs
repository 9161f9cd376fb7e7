// What of one choice has come. A restarted output process sends everything again from the beginning, so a delta says
// which tokens and characters (Unicode code points) stand before it, and what is known already is cut off.

export class ChoiceCursor {
  #numTokens = 0;
  #numChars = 0;
  hasEnded = false;

  /** What is new in a delta, or null if nothing is. Throws if something before it is missing. */
  take(delta) {
    if (this.hasEnded) return null;
    const knownTokens = this.#numTokens - delta.tokenOffset;
    const knownChars = this.#numChars - delta.textOffset;
    if (delta.tokenOffset >= 0 && (knownTokens < 0 || knownChars < 0)) {
      throw new Error(`choice ${delta.index}: tokens or text before the next delta are missing`);
    }
    const fresh = delta.tokenOffset < 0 ? this.#whole(delta) : this.#rest(delta, knownTokens, knownChars);
    this.hasEnded = delta.finishReason !== null;
    return fresh;
  }

  /** Of the output kinds `cumulative` and `final`: it holds everything so far. */
  #whole(delta) {
    if (delta.tokenIds.length <= this.#numTokens && delta.finishReason === null) return null;
    this.#numTokens = delta.tokenIds.length;
    return delta;
  }

  #rest(delta, knownTokens, knownChars) {
    const tokenIds = knownTokens ? delta.tokenIds.slice(knownTokens) : delta.tokenIds;
    const chars = Array.from(delta.text).slice(knownChars); // by code points: a JavaScript string counts UTF-16 units
    if (!tokenIds.length && !chars.length && delta.finishReason === null) return null;
    this.#numTokens += tokenIds.length;
    this.#numChars += chars.length;
    const logprobs = delta.logprobs?.slice(knownTokens) ?? null;
    return { ...delta, tokenIds, text: chars.join(""), logprobs };
  }
}
