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
TOPICS: Final[dict[str, str]] = {
    "delivery": "Parcels and couriers",
    "refund": "Sending things back",
    "billing": "Invoices and charges",
    "hardware": "Broken parts",
    "software": "Apps and updates",
    "account": "Logins and passwords",
}
"""The topic in an agent's words. None of them is a label of the ticket task."""

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
