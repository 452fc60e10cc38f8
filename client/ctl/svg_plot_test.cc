// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/svg_plot.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace kvtier::ctl {
namespace {

// Every element is closed, and nothing that XML reserves stands in text.
void ExpectWellFormed(const std::string& svg) {
  std::vector<std::string> open;
  size_t at = 0;
  while ((at = svg.find('<', at)) != std::string::npos) {
    const size_t end = svg.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = svg.substr(at + 1, end - at - 1);
    at = end;
    if (tag.ends_with('/')) continue;
    if (!tag.starts_with('/')) {
      open.push_back(tag.substr(0, tag.find(' ')));
      continue;
    }
    ASSERT_FALSE(open.empty());
    EXPECT_EQ(tag.substr(1), open.back());
    open.pop_back();
  }
  EXPECT_TRUE(open.empty());
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
}

size_t CountOf(const std::string& svg, const std::string& part) {
  size_t count = 0;
  for (size_t at = svg.find(part); at != std::string::npos; at = svg.find(part, at + 1)) ++count;
  return count;
}

// The attribute of the first element after `from`.
double NumberAfter(const std::string& svg, size_t from, const std::string& name) {
  const size_t at = svg.find(" " + name + "=\"", from);
  return std::stod(svg.substr(at + name.size() + 3));
}

TEST(SvgPlotTest, LongNamesStayInThePicture) {
  constexpr double kWide =
      7.0;  // Of a character of 11 px in DejaVu Sans, which browsers fall back to.
  const std::string name = "nvfp4_mean_smooth_amax_4over6";
  const Chart chart = BarChart{
      .title = "t", .y_label = "y", .groups = {name}, .series = {{.name = "s", .values = {1.0}}}};
  const std::string svg = SvgOf(std::span(&chart, 1));
  const size_t text = svg.rfind("<text", svg.find(">" + name));
  const double bottom = NumberAfter(svg, text, "y") +
                        std::sin(40 * M_PI / 180) * kWide * static_cast<double>(name.size());
  EXPECT_GE(NumberAfter(svg, 0, "height"), bottom);
}

TEST(SvgPlotTest, BarsStandOnZeroAndAreAsHighAsTheirValues) {
  const Chart chart = BarChart{.title = "t",
                               .y_label = "y",
                               .groups = {"a", "b"},
                               .series = {{.name = "s", .values = {2.0, 4.0}}}};
  const std::string svg = SvgOf(std::span(&chart, 1));
  ExpectWellFormed(svg);
  const size_t bars = svg.find("<rect", svg.find(">s</text>"));
  const double first = NumberAfter(svg, bars, "height");
  const double second = NumberAfter(svg, svg.find("<rect", bars + 1), "height");
  EXPECT_NEAR(second / first, 2.0, 1e-3);
  EXPECT_NEAR(second, 260.0, 0.1);  // the axis ends at 4
}

TEST(SvgPlotTest, ADecadeOnALogAxisIsAlwaysAsHigh) {
  const Chart chart = BarChart{
      .title = "t",
      .y_label = "y",
      .log_y = true,
      .groups = {"a", "b", "c", "d", "e"},
      .series = {{.name = "s",
                  .values = {0.001, 0.01, 0.1, 0.0, std::numeric_limits<double>::quiet_NaN()}}}};
  const std::string svg = SvgOf(std::span(&chart, 1));
  ExpectWellFormed(svg);
  EXPECT_EQ(CountOf(svg, "<title>"), 3U);  // 0 and NaN have no place
  size_t at = svg.find("<rect", svg.find(">s</text>"));
  std::vector<double> heights;
  for (int i = 0; i < 3; ++i) {
    heights.push_back(NumberAfter(svg, at, "height"));
    at = svg.find("<rect", at + 1);
  }
  EXPECT_NEAR(heights[2] - heights[1], heights[1] - heights[0], 0.05);
}

TEST(SvgPlotTest, LinesGoThroughTheirPoints) {
  const Chart chart = LineChart{
      .title = "hit rate",
      .x_label = "GiB",
      .y_label = "rate",
      .log_x = true,
      .series = {{.name = "up", .points = {{1, 0.0}, {10, 0.5}, {100, 1.0}}}, {.name = "none"}}};
  const std::string svg = SvgOf(std::span(&chart, 1));
  ExpectWellFormed(svg);
  EXPECT_NE(svg.find("points=\"70.0,326.0 505.0,196.0 940.0,66.0\""), std::string::npos) << svg;
  EXPECT_EQ(CountOf(svg, "<circle"), 3U);
}

TEST(SvgPlotTest, AnyTextIsSafe) {
  const Chart charts[] = {BarChart{.title = "<&\"> \x01",
                                   .y_label = "</svg>",
                                   .groups = {"a<b"},
                                   .series = {{.name = "x&y", .values = {1.0}}}},
                          LineChart{.title = "empty"}};
  const std::string svg = SvgOf(charts);
  ExpectWellFormed(svg);
  EXPECT_NE(svg.find("&lt;&amp;&quot;&gt;  </text>"), std::string::npos);
  EXPECT_EQ(svg, SvgOf(charts));
}

TEST(SvgPlotTest, NegativeAndConstantValuesHaveAxes) {
  const Chart charts[] = {
      BarChart{.groups = {"a", "b"}, .series = {{.name = "s", .values = {-1.0, 3.0}}}},
      BarChart{.groups = {"a"}, .series = {{.name = "s", .values = {0.0}}}},
      LineChart{.series = {{.name = "s", .points = {{5, 7}, {5, 7}}}}},
      LineChart{.log_y = true, .series = {{.name = "s", .points = {{1, -1}}}}}};
  ExpectWellFormed(SvgOf(charts));
}

}  // namespace
}  // namespace kvtier::ctl
