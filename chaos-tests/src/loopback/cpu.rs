//! CPU time of one process, and what the machine spent in softirqs.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::ops::Sub;

/// In seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cpu {
    /// Of the process.
    pub user_s: f64,
    /// Of the process.
    pub system_s: f64,
    /// Of the machine.
    pub softirq_s: f64,
}

impl Cpu {
    /// So far.
    pub fn of(pid: u32) -> Result<Self> {
        // SAFETY: asks for a constant.
        let ticks_per_s = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1) as f64;
        let process = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let machine = std::fs::read_to_string("/proc/stat")?;
        let (user, system) = of_process(&process).context("/proc/PID/stat is not as expected")?;
        let softirq = of_machine(&machine).context("/proc/stat is not as expected")?;
        Ok(Self {
            user_s: user as f64 / ticks_per_s,
            system_s: system as f64 / ticks_per_s,
            softirq_s: softirq as f64 / ticks_per_s,
        })
    }

    /// All of it.
    pub fn total_s(self) -> f64 {
        self.user_s + self.system_s + self.softirq_s
    }
}

impl Sub for Cpu {
    type Output = Self;
    /// Between two looks, the later one first.
    fn sub(self, earlier: Self) -> Self {
        Self {
            user_s: self.user_s - earlier.user_s,
            system_s: self.system_s - earlier.system_s,
            softirq_s: self.softirq_s - earlier.softirq_s,
        }
    }
}

/// User and system ticks (proc_pid_stat(5): fields 14 and 15; the name may hold anything).
fn of_process(stat: &str) -> Option<(u64, u64)> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

/// Softirq ticks of all cores (proc_stat(5): user nice system idle iowait irq softirq).
fn of_machine(stat: &str) -> Option<u64> {
    let all = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    all.split_whitespace().nth(6)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_right_fields() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 100 200 3 4 11 22 5 6 20 0 9 0 1234 0 0";
        assert_eq!(of_process(stat), Some((11, 22)));
        let machine = "cpu  1 2 3 4 5 6 77 8 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n";
        assert_eq!(of_machine(machine), Some(77));
        assert_eq!(of_process("7 (a"), None);
        assert_eq!(of_machine(""), None);
    }

    #[test]
    fn this_process_uses_some() {
        let before = Cpu::of(std::process::id()).unwrap();
        let mut x = 1u64;
        let mut used = Cpu::default();
        // As much as it takes: a tick is 10 ms.
        while used.user_s == 0.0 {
            x = std::hint::black_box(x.wrapping_mul(3));
            used = Cpu::of(std::process::id()).unwrap() - before;
        }
        assert!(used.total_s() >= used.user_s && used.system_s >= 0.0);
    }
}
