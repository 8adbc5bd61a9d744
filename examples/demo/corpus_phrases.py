"""What only the base model's corpus says about support: more phrases of each topic, and an agent's answers in prose.

No phrase here is one of a ticket's, seen or unseen. ``[a|b]`` and ``{p}`` mean what they mean in ``phrases.py``.
"""

from __future__ import annotations

from typing import Final

BASE_ONLY: Final[dict[str, tuple[str, ...]]] = {
    "delivery": (
        "the mail carrier did not [come|ring] with my {p}",
        "my parcel with the {p} shows no movement",
        "how long does [shipping|delivery] of the {p} take",
        "the tracking number of the {p} does not work",
        "has the {p} been shipped [already|yet]",
        "the box with the {p} went to my neighbour",
        "I am waiting for the {p} since {d}",
        "the courier lost the {p}",
        "the delivery date of the {p} changed again",
        "the {p} never came",
        "the package was empty, no {p} inside",
        "nothing has been delivered to {city}, where is the {p}",
        "the shipping company does not answer about the {p}",
    ),
    "refund": (
        "I regret buying the {p}, take it back please",
        "how long does a refund for the {p} take",
        "I returned the {p}, where is the money",
        "you owe me the money for the {p} I returned",
        "the {p} is too big, can I give it back",
        "I would like to be refunded for the {p}",
        "the return form for the {p} does not open",
        "where do I print the return label for the {p}",
        "I want to cancel the {p} and get the money back",
        "my money for the {p} has not come back",
        "is it possible to return the {p} after {n} days",
        "refund the {p} to my card please",
    ),
    "billing": (
        "the amount on my statement for the {p} is {a}, why",
        "I see a strange fee of {a} for the {p}",
        "my bill for the {p} came twice",
        "the invoice of the {p} has the wrong name",
        "can I pay the {p} by invoice",
        "you took {a} from my bank for the {p}",
        "my credit card was charged for a {p} I never bought",
        "the voucher did not lower the price of the {p}",
        "the receipt for the {p} is missing the tax",
        "a payment of {a} for the {p} is unknown to me",
        "please correct the invoice for the {p}",
        "the price of the {p} on the bill is not the one in the shop",
    ),
    "hardware": (
        "the {p} is cracked",
        "the {p} is completely dead",
        "something inside the {p} is loose",
        "the {p} smells burnt and gets hot",
        "the {p} does not charge any more",
        "my {p} fell and the case broke",
        "the screen of the {p} is broken",
        "the {p} turns off after {n} minutes, the battery is weak",
        "the {p} came damaged out of the box",
        "the plug of the {p} is bent",
        "my {p} is broken",
        "the cable of my {p} is loose",
        "the {p} rattles and smokes",
    ),
    "software": (
        "the {p} crashes when I open the app",
        "the update broke everything on the {p}",
        "the {p} app does not connect",
        "pairing the {p} with my phone fails",
        "the {p} freezes after the firmware update",
        "I see error {n} in the {p} app",
        "the new version on the {p} is slow and has bugs",
        "the {p} restarts by itself since the update",
        "the {p} app logs an error and closes",
        "bluetooth on the {p} drops since the update",
        "the {p} app is stuck on loading",
    ),
    "account": (
        "my password for the {p} does not work",
        "I lost my login for the {p}",
        "the {p} portal does not let me sign in",
        "my {p} account was hacked",
        "I am locked out and cannot reach my {p}",
        "the email on my {p} account is wrong",
        "please unlock the account of my {p}",
        "how do I reset the password for the {p}",
        "I need a new login code for the {p}",
        "someone changed the password of my {p} account",
        "I want to close my account for the {p}",
    ),
}
"""Phrases of no ticket, seen or unseen: they make the base's notion of a topic wider than the training tickets."""

BASE_ONLY_URGENCY: Final[dict[str, tuple[str, ...]]] = {
    "high": (
        "I need it now.",
        "As soon as possible please.",
        "We are blocked, urgent help needed.",
        "It must be fixed today.",
        "Please answer fast, this is an emergency.",
        "Quick please!",
        "I cannot wait any longer.",
    ),
    "normal": (),
    "low": (
        "No need to hurry.",
        "It is fine if this takes a while.",
        "Only a minor question.",
        "Not urgent for me.",
        "You can take a minute or a month.",
        "It can wait.",
        "Answer when you have time.",
    ),
}

ACTIONS: Final[dict[str, tuple[str, ...]]] = {
    "delivery": ("I will check where the parcel is.", "I will ask the courier about it.", "The parcel should reach you soon."),
    "refund": (
        "I will see when the money goes back to you.",
        "You can send it back to us for your money.",
        "I will start the return for you.",
    ),
    "billing": ("I will look at the invoice.", "I will check what was charged.", "Our accountant will correct the bill."),
    "hardware": ("It sounds broken, I can offer a repair.", "We can repair or replace it.", "Please send us a photo of the damage."),
    "software": ("Please install the newest version.", "Please restart the app first.", "Our developers are looking at the bug."),
    "account": ("I will send you a new password.", "I will unlock your login.", "Please check your email for a new code."),
}
GISTS: Final[dict[str, tuple[str, ...]]] = {
    "delivery": ("a parcel that did not come", "a parcel on its way"),
    "refund": ("money back for a thing sent back", "giving a thing back"),
    "billing": ("a charge or a bill", "what was paid"),
    "hardware": ("a broken part", "damage to the device"),
    "software": ("an app or an update", "a bug in the app"),
    "account": ("a login or a password", "signing in"),
}
PACE: Final[dict[str, str]] = {"high": "soon, today if possible", "normal": "in the usual time", "low": "at any time"}
