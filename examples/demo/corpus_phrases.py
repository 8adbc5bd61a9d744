"""What the base model's corpus answers: an agent's words about each topic, and evidence of classes outside support."""

from __future__ import annotations

from typing import Final

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
TOPICS: Final[dict[str, str]] = {
    "delivery": "Parcels and couriers",
    "refund": "Sending things back",
    "billing": "Invoices and charges",
    "hardware": "Broken parts",
    "software": "Apps and updates",
    "account": "Logins and passwords",
}
"""The topic in an agent's words. None of them is a label of the ticket task."""
TAGS: Final[dict[str, str]] = {
    "delivery": "parcels",
    "refund": "returns",
    "billing": "invoices",
    "hardware": "damage",
    "software": "apps",
    "account": "logins",
}
TIMES: Final[dict[str, str]] = {"high": "soon", "normal": "usual", "low": "later"}
RECORD_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "device": ("device", "gadget", "item"),
    "about": ("about", "subject", "matter"),
    "when": ("when", "pace", "haste"),
    "number": ("number", "reference", "case"),
}
"""What an agent's record of a message may call its fields and their values, in other words than the ticket task's."""

EVIDENCE: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "sport": {
        "tennis": ("I forgot my racket.", "The ball hit the net.", "She served an ace.", "We booked a court."),
        "swimming": ("The pool was cold.", "I did forty lanes.", "Bring goggles.", "He dived in first."),
        "chess": ("My queen was lost.", "He moved a pawn.", "The king fell at last.", "She played the white pieces."),
        "running": ("We did a marathon.", "My shoes hurt after ten miles.", "I jog every morning.", "She won the sprint."),
    },
    "meal": {
        "breakfast": ("The toast was burnt.", "We had eggs at seven.", "There was cereal and milk.", "I had jam on a roll."),
        "lunch": ("At noon we had soup.", "I ate a sandwich at my desk.", "The canteen had pasta.", "We met at one for a salad."),
        "dinner": ("We ate late by candle light.", "The roast came at eight.", "In the evening we cooked.", "They had steak and wine."),
    },
    "season": {
        "winter": ("It snowed all day.", "The lake is frozen.", "I need my gloves.", "Ice was on the road."),
        "spring": ("The tulips are out.", "Birds build their nests.", "The trees turn green again.", "We planted seeds."),
        "summer": ("It was hot at the beach.", "We bought ice cream.", "I got a sunburn.", "The days are long and hot."),
        "autumn": ("The leaves fall.", "We picked mushrooms.", "It is foggy and the apples are ripe.", "Storms blow through the trees."),
    },
    "mood": {
        "happy": ("What a lovely day!", "I could sing.", "We laughed a lot.", "I am so glad."),
        "sad": ("I cried all night.", "I miss her so much.", "Nothing makes me smile.", "It broke my heart."),
        "calm": ("I slept well.", "All is quiet here.", "We sat still by the river.", "I took a deep breath."),
    },
    "travel": {
        "train": ("The platform was full.", "We sat in the second carriage.", "The rails are wet.", "A conductor saw my ticket."),
        "plane": ("We landed at ten.", "The gate was closed.", "The pilot said hello.", "I saw clouds from above."),
        "ship": ("The harbour was busy.", "Waves rocked us to sleep.", "The captain waved.", "We stood on deck."),
        "bike": ("I had a flat tyre.", "My helmet is red.", "I pedalled up the hill.", "The chain came off."),
    },
}
"""Key -> class -> sentences that give it away without the word. Nothing of support in it."""
