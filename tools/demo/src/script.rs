//! The prompts of the models, and the lengths of their texts.

use crate::Model;

const END: &str = "<|im_end|>";

/// A direction that a fork takes.
pub struct Direction {
    /// For the eye.
    pub title: &'static str,
    /// What is appended to the state.
    pub appended: String,
}

/// A story for one model.
pub struct Script {
    /// `--model` of `pf-kv serve`.
    pub model: &'static str,
    /// What the model is, for people.
    pub name: &'static str,
    /// What the user asked, for the eye.
    pub question: &'static str,
    /// All of the prompt.
    pub prompt: String,
    /// Tokens after which the snapshot is taken, the model being in the middle of it.
    pub until_snapshot: u64,
    /// Tokens that the model says in all.
    pub story: u64,
    /// Where the forks go.
    pub directions: [Direction; 3],
    /// Tokens that a fork says before it is captured, and that it says afterwards.
    pub fork: u64,
    /// The text with which the model ends; `None` if its tokens are not text.
    pub end: Option<&'static str>,
}

impl Script {
    /// The story for a model.
    pub fn of(model: Model) -> Self {
        match model {
            Model::Smollm2 => Self::told(),
            Model::Hybrid => Self::numbered(),
        }
    }

    /// Whether tokens are text.
    pub fn is_text(&self) -> bool {
        self.end.is_some()
    }

    /// Real weights: a story with interruptions by listeners.
    fn told() -> Self {
        let question = "Tell me a story about an old lighthouse keeper, her cat, and a knock at the door on a stormy night.";
        let system = "You are a storyteller. You tell short stories in plain words.";
        let interrupt = |title| Direction { title, appended: format!("{END}\n{}", user(title)) };
        Self {
            model: "smollm2",
            name: "SmolLM2-135M-Instruct",
            question,
            prompt: format!("<|im_start|>system\n{system}<|im_end|>\n{}", user(question)),
            until_snapshot: 48,
            story: 108,
            directions: ["Tell it as a pirate.", "What is the cat's name?", "How does it end?"].map(interrupt),
            fork: 32,
            end: Some(END),
        }
    }

    /// Random weights, with every kind of state: the tokens mean nothing.
    fn numbered() -> Self {
        let question = "Random weights: linear attention, a sliding window and full attention. Its tokens mean nothing, its state is real.";
        let direct = |title: &'static str| Direction { title, appended: title.to_owned() };
        Self {
            model: "hybrid",
            name: "a hybrid model with random weights",
            question,
            prompt: question.repeat(2),
            until_snapshot: 24,
            story: 64,
            directions: ["left", "straight on", "right"].map(direct),
            fork: 24,
            end: None,
        }
    }
}

fn user(text: &str) -> String {
    format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
}
