//! What the log says of reports of agents that are not kept. Every agent reports again and again,
//! so a line for each report would be most of the log.

use parking_lot::Mutex;
use pfr_schema::AgentName;
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// Shortest time between two lines that say the same of the disk. A disk near its floor may have
/// room and none by turns.
const LINE: Duration = Duration::from_secs(300);
/// Refused agents that are remembered: any caller with `push` may make up names. One more that is
/// refused has no line.
const REFUSED: usize = 1000;
/// How long a refused agent is remembered that sends no report any more. Those that go on send one
/// every hour at least.
const REMEMBERED: Duration = Duration::from_secs(2 * 3600);

/// What the log has said of the reports of a domain.
#[derive(Debug, Default)]
pub(crate) struct ReportLog(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Whether the disk has no room for reports, as the log said last.
    is_full: bool,
    /// When the log said last that it has room, and that it has none.
    said: [Option<Instant>; 2],
    /// Agents whose reports are refused, and when each of them was last.
    refused: HashMap<AgentName, Instant>,
}

impl ReportLog {
    /// Notes whether the disk had room for a report; returns whether the log is to say so. A change
    /// within [`LINE`] of the line about the last such change is said later, if it lasts.
    pub(crate) fn is_news(&self, is_full: bool) -> bool {
        let (mut state, now) = (self.0.lock(), Instant::now());
        let said = state.said[usize::from(is_full)];
        if state.is_full == is_full || said.is_some_and(|at| now.duration_since(at) < LINE) {
            return false;
        }
        state.is_full = is_full;
        state.said[usize::from(is_full)] = Some(now);
        true
    }

    /// Notes that the report of an agent was refused; returns whether the log is to say so: it has
    /// not since a report of this agent was kept.
    pub(crate) fn is_first(&self, agent: &AgentName) -> bool {
        let (mut state, now) = (self.0.lock(), Instant::now());
        let refused = &mut state.refused;
        if let Some(at) = refused.get_mut(agent) {
            *at = now;
            return false;
        }
        if refused.len() >= REFUSED {
            refused.retain(|_, at| now.duration_since(*at) < REMEMBERED);
        }
        if refused.len() >= REFUSED {
            return false;
        }
        refused.insert(agent.clone(), now);
        true
    }

    /// Notes that the report of an agent was kept.
    pub(crate) fn kept(&self, agent: &AgentName) {
        self.0.lock().refused.remove(agent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    fn agent(number: usize) -> AgentName {
        format!("gpu-{number}").parse().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_is_full_by_turns_has_one_line_each_way_in_some_minutes() {
        let log = ReportLog::default();
        assert!(!log.is_news(false), "nothing was refused");
        let turns = |log: &ReportLog| [true, false, true, true, false, true].map(|is_full| log.is_news(is_full));
        assert_eq!(turns(&log), [true, true, false, false, false, false]);
        advance(LINE).await;
        // It has been full since: that is said now, and not that it is full still.
        assert!(log.is_news(true) && !log.is_news(true));
        assert!(log.is_news(false), "the line before it is as old");
        assert_eq!(turns(&log), [false; 6]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_is_refused_has_one_line_until_a_report_of_it_is_kept() {
        let log = ReportLog::default();
        assert!(log.is_first(&agent(1)) && log.is_first(&agent(2)));
        for _ in 0..100 {
            advance(LINE).await;
            assert!(!log.is_first(&agent(1)));
        }
        log.kept(&agent(1));
        assert!(log.is_first(&agent(1)) && !log.is_first(&agent(2)));
    }

    #[tokio::test(start_paused = true)]
    async fn made_up_names_fill_neither_the_memory_nor_the_log() {
        let log = ReportLog::default();
        let lines = (0..3 * REFUSED).filter(|number| log.is_first(&agent(*number))).count();
        assert_eq!((lines, log.0.lock().refused.len()), (REFUSED, REFUSED));
        advance(REMEMBERED).await;
        assert!(!log.is_first(&agent(7)), "it goes on");
        assert!(log.is_first(&agent(2 * REFUSED)), "the others have ended");
        assert_eq!(log.0.lock().refused.len(), 2);
    }
}
